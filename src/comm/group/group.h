#pragma once

#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/backend.h>
#include <lockstep/call_options.h>
#include <lockstep/work.h>

#include "base/owner_process.h"
#include "base/text.h"
#include "comm/group/backoff.h"
#include "comm/group/membership.h"
#include "comm/group/queued_calls.h"
#include "comm/group/work_queue.h"
#include "comm/watch/fingerprint.h"
#include "comm/watch/job.h"

namespace lockstep::detail {

/// What all handles of one group share: the backend, the order of calls, and whether the group still works.
///
/// A call has a call_id that all ranks know it by: collectives are numbered ("call 7"), messages between two ranks too
/// ("message 3 from rank 0 to rank 2 with tag 0"). Ranks that wait long ask each other about the call_id, and so find
/// out who makes another call, or none. Thread-safe.
class Group final : public std::enable_shared_from_this<Group>, private JobListener {
 public:
  /// A checked call, ready to be made. Its body may refer to the tensors it was made of, and must not hold a handle of
  /// the group, which would then outlive its last user.
  struct Call {
    Fingerprint fingerprint;
    std::function<void(Backend&, const CallInfo&)> body;
  };

  /// Made by make_shared_owned: a forked child must not destroy it. A rank that is not a member has no backend. The
  /// cpu_group is of the same ranks, for tensors on the CPU: the two are broken (see base_name), and end, together.
  Group(Membership membership, std::shared_ptr<Job> job, std::unique_ptr<Backend> backend,
        std::shared_ptr<Group> cpu_group = nullptr);
  ~Group() override;

  const Membership& membership() const { return membership_; }
  int rank_in_job() const { return rank_in_job_; }

  /// UsageError in a child that was forked from this rank's process. Calls begin with it, before they take
  /// a mutex: a thread that the child does not have may hold it.
  void check_process() const {
    if (!owner_.is_this()) owner_.refuse(text("rank ", rank_in_job_, "'s process"));
  }

  /// The group for tensors of that device: this one, unless its cpu_group is for it.
  Group& for_device(c10::DeviceType type);
  /// The group by which ranks agree about what is no data of the user's: for the CPU where there is one.
  Group& for_control() { return for_device(c10::kCPU); }
  const std::shared_ptr<Group>& cpu_group() const { return cpu_group_; }

  /// Both: UsageError when the group was destroyed or this rank is not a member.
  std::shared_ptr<Job> job() const { return parts()->job; }
  std::shared_ptr<Backend> backend() const;

  /// Makes the call in its turn.
  void run(const Call& call, const CallOptions& options);
  Work submit(Call call, const CallOptions& options);

  /// Returns when the calls so far are done, on a device too, or throws why the group is broken.
  void synchronize();

  /// Returns when the device has fewer calls than that still to do, or throws why the group is broken.
  void await_room(size_t most);

  /// Makes a call that does not go through the backend, in its turn. When it throws, the group goes on.
  void run_aside(Operation operation, const CallOptions& options,
                 const std::function<void(const CallRecord&, std::chrono::milliseconds timeout)>& body);

  /// A message, which is no part of the order of collectives: `start` begins it; wait() returns when it is done.
  class Message {
   public:
    using Start = std::function<std::unique_ptr<Transfer>(Backend&, uint64_t fingerprint)>;

    Message(std::shared_ptr<Group> group, const MessageRoute& route, Fingerprint call, const CallOptions& options,
            const Start& start);
    ~Message();

    void wait();
    bool is_done();

   private:
    void guard(WorkQueue::Lock& lock, std::chrono::steady_clock::time_point begin,
               const std::function<CallRecord::State(const CallInfo&)>& body);
    std::shared_ptr<Transfer> transfer();

    const std::shared_ptr<Group> group_;
    const std::shared_ptr<Job> job_;          // outlives the transfer, even when the group is destroyed
    const std::shared_ptr<Backend> backend_;  // the same
    const std::chrono::milliseconds timeout_;
    CallRecord record_;
    std::mutex mutex_;
    std::shared_ptr<Transfer> transfer_;  // guarded by mutex_; empty when done
  };

  /// Throws why the group is broken, if it is.
  void check_working();

  /// How many groups have been made of this one; counts on.
  int next_child();

  /// Waits for the calls that are pending and leaves the group: the others may go on until they need this rank.
  void destroy();

  /// Breaks the group: see Backend::abort. In two steps for those who break several groups at once, so that none takes
  /// the closed connections of another for the cause.
  void abort(const std::exception_ptr& cause);
  /// Calls fail from here on with the cause, or with the earlier one that there is; returns which.
  std::exception_ptr mark_broken(const std::exception_ptr& cause);
  /// Wakes the calls that wait.
  void wake();

 private:
  struct Parts {
    std::shared_ptr<Job> job;
    std::shared_ptr<Backend> backend;
  };
  /// A recorded call that somebody waits for. Made with mutex_ held, which it takes again when it goes.
  struct Watched {
    Watched(Group& group, WorkQueue::Lock& lock, const CallRecord& record, std::chrono::steady_clock::time_point begin);
    ~Watched();

    Group& group;
    WorkQueue::Lock& lock;
    const CallRecord& record;
    const std::chrono::steady_clock::time_point begin;
    std::exception_ptr refusal{};  // constant: why the group was broken before
    bool breaks_group = false;     // constant: it is broken only now, by a rank that left too early
    CallRecord::State outcome = CallRecord::State::kFailed;  // its thread's: noted in the end
    Backoff backoff;                                         // guarded by mutex_
  };
  class QueuedWork;
  struct Departure {
    int64_t calls;  // that it made
    int rank_in_job;
    std::string who;
  };

  std::shared_ptr<Parts> parts() const;
  std::shared_ptr<Parts> parts_if_any() const;
  [[noreturn]] void refuse_destroyed() const;
  void leave(const std::shared_ptr<Parts>& parts);
  std::exception_ptr failure() const;
  int64_t calls() const;
  std::chrono::milliseconds timeout_of(const CallOptions& options) const;

  /// Returns what goes on after it, where the backend queues its calls.
  std::shared_ptr<QueuedCall> execute(WorkQueue::Lock& lock, const Call& call, const CallOptions& options,
                                      std::chrono::milliseconds timeout, Backend::Stream stream,
                                      std::shared_ptr<const void> kept);
  Work queue(const std::shared_ptr<const Call>& call, const CallOptions& options, std::chrono::milliseconds timeout);
  void retire_queued();
  void guard(const Watched& watched, std::chrono::milliseconds timeout,
             const std::function<void(const CallInfo&)>& body);
  [[noreturn]] void fail(const CallRecord& record, std::chrono::milliseconds timeout, std::exception_ptr error);
  std::exception_ptr diagnose(const CallRecord& record, std::chrono::milliseconds timeout,
                              const std::exception_ptr& error);
  std::vector<Answer> ask_when_all_came(const CallRecord& record) const;
  Failure timeout_failure(const CallRecord& record, std::chrono::milliseconds timeout,
                          const std::vector<Answer>& answers) const;
  std::exception_ptr departure_before(const CallId& call_id) const;
  void blame_departure(const std::exception_ptr& cause);
  std::string last_words(const std::exception_ptr& cause);

  void on_failure(std::exception_ptr cause) override;
  void on_left(int rank_in_job, int64_t calls) override;
  void on_answers(const std::string& call_id, const std::vector<Answer>& answers) override;
  void on_tick() override;

  const OwnerProcess owner_{};
  const Membership membership_;
  const int rank_in_job_;
  const std::shared_ptr<FlightRecorder> recorder_;
  const bool is_queueing_;  // the backend is
  const std::shared_ptr<Group> cpu_group_;
  std::mutex& mutex_;  // the recorder's
  QueuedCalls queued_{*recorder_};
  std::shared_ptr<Parts> parts_;              // guarded by mutex_; none once destroyed
  std::exception_ptr failure_;                // guarded by mutex_
  std::vector<Watched*> watched_;             // guarded by mutex_
  std::optional<Departure> departure_;        // guarded by mutex_: the one with the fewest calls
  bool departure_came_first_ = false;         // guarded by mutex_: before what broke the group
  std::map<MessageRoute, int64_t> messages_;  // guarded by mutex_: how many so far
  std::map<Operation, int64_t> aside_;        // guarded by mutex_: calls aside, by operation
  int children_ = 0;                          // guarded by mutex_
  int64_t calls_ = 0;                         // guarded by mutex_: collectives begun
  WorkQueue queue_{mutex_, rank_in_job_};     // last: its tasks use all of the above
};

}  // namespace lockstep::detail
