#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
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

/// The state that all handles of one group share: the backend, the order of calls, and whether the group is broken.
///
/// Each call has a CallId, which is the same on all ranks: collectives are numbered ("call 7"), and so are messages
/// between two ranks ("message 3 from rank 0 to rank 2 with tag 0"). A rank that waits long asks the other ranks about
/// the CallId, and so finds ranks that make a different call or none. Thread-safe.
class Group final : public std::enable_shared_from_this<Group>, private JobListener {
 public:
  /// A call whose arguments were checked. The body may refer to the tensors of the caller. It must not hold a handle of
  /// the group, because the group would then outlive its last user.
  struct Call {
    Fingerprint fingerprint;
    std::function<void(Backend&, const CallInfo&)> body;
  };

  /// Create it with make_shared_owned: a forked child must not destroy it. On a rank that is not a member the backend
  /// is null. `cpu_group` has the same ranks and handles tensors on the CPU. A failure of one group breaks both (see
  /// base_name), and both are destroyed together.
  Group(Membership membership, std::shared_ptr<Job> job, std::unique_ptr<Backend> backend,
        std::shared_ptr<Group> cpu_group = nullptr);
  ~Group() override;

  const Membership& membership() const { return membership_; }
  int rank_in_job() const { return rank_in_job_; }
  const std::shared_ptr<Activity>& activity() const { return activity_; }
  const std::shared_ptr<FlightRecorder>& recorder() const { return recorder_; }
  /// Why the group is broken; null if it is not.
  std::exception_ptr failure() const;

  /// Throws UsageError in a forked child of this rank's process. Calls check this before they lock a mutex, because the
  /// mutex may be held by a thread that does not exist in the child.
  void check_process() const {
    if (!owner_.is_this()) owner_.refuse(text("rank ", rank_in_job_, "'s process"));
  }

  /// Returns the group for tensors on that device type: the cpu_group if it is for that type, else this group.
  Group& for_device(c10::DeviceType type);
  /// Returns the group for internal communication: the one for the CPU if there is one.
  Group& for_control() { return for_device(c10::kCPU); }
  const std::shared_ptr<Group>& cpu_group() const { return cpu_group_; }

  /// A group of the same ranks with an order of calls of its own, for lockstep's calls that must not wait for those of
  /// this group; null before make_side_group(). A failure of one group breaks both, and both are destroyed together.
  std::shared_ptr<Group> side_group() const;
  void set_side_group(std::shared_ptr<Group> group);

  /// Both throw UsageError when the group was destroyed; backend() also when this rank is not a member.
  std::shared_ptr<Job> job() const { return parts()->job; }
  std::shared_ptr<Backend> backend() const;

  /// Make the call after all earlier calls. run() blocks until the call is done, or is queued on a device. submit()
  /// does not wait for the call.
  void run(const Call& call, const CallOptions& options);
  Work submit(Call call, const CallOptions& options);

  /// Blocks until all calls so far are done, also on the device. Throws the failure if the group is broken.
  void synchronize();

  /// Blocks until fewer than `most` calls are queued on the device. Throws the failure if the group is broken.
  void await_room(size_t most);

  /// Makes a call that does not use the backend, after all earlier calls. If `body` throws, the group is not broken.
  void run_aside(Operation operation, const CallOptions& options,
                 const std::function<void(const CallRecord&, std::chrono::milliseconds timeout)>& body);

  /// A message between two ranks, outside the order of collectives. `start` begins it; wait() blocks until it is done.
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
    const std::shared_ptr<Backend> backend_;  // likewise
    const std::chrono::milliseconds timeout_;
    CallRecord record_;
    std::mutex mutex_;
    std::shared_ptr<Transfer> transfer_;  // guarded by mutex_; empty when done
  };

  /// Blocks until a rank has started to send a message with this tag that this rank has not started to receive. Returns
  /// that rank, and the options with the rest of the time. Throws TimeoutError, which leaves the group usable.
  std::pair<int, CallOptions> await_sender(uint32_t tag, const CallOptions& options);

  /// Throws the failure if the group is broken.
  void check_working();

  /// Returns the number of the next subgroup of this group, counting from 1.
  int next_child();

  /// Waits for pending calls and leaves the group. The other ranks can make calls until one of them needs this rank.
  void destroy();

  /// Breaks the group: see Backend::abort. Callers that break several groups at once use the two steps below, so that
  /// no group takes the closed connections of another group for the cause.
  void abort(const std::exception_ptr& cause);
  /// Makes all later calls fail with the cause, or with an earlier cause if there is one. Returns the effective cause.
  std::exception_ptr mark_broken(const std::exception_ptr& cause);
  /// Wakes calls that block.
  void wake();

 private:
  struct Parts {
    std::shared_ptr<Job> job;
    std::shared_ptr<Backend> backend;
  };
  /// A recorded call on which a thread blocks. The constructor requires mutex_; the destructor locks it again.
  struct Watched {
    Watched(Group& group, WorkQueue::Lock& lock, const CallRecord& record, std::chrono::steady_clock::time_point begin);
    ~Watched();

    Group& group;
    WorkQueue::Lock& lock;
    const CallRecord& record;
    const std::chrono::steady_clock::time_point begin;
    std::exception_ptr refusal{};  // constant: why the group was already broken
    bool breaks_group = false;     // constant: this call breaks the group, because a rank has left before it
    CallRecord::State outcome = CallRecord::State::kFailed;  // used by its thread; recorded by the destructor
    Backoff backoff;                                         // guarded by mutex_
  };
  /// What this rank knows about messages that a rank receives from any sender. All guarded by mutex_.
  struct AnySender {
    std::set<std::pair<int, uint32_t>> subscribers{};  // ranks, and tags of messages to them that this rank announces
    std::set<uint32_t> subscribed_tags{};              // tags to which this rank has subscribed
    std::map<MessageRoute, int64_t> announced{};       // number of messages that other ranks have announced
    std::condition_variable changed{};                 // also after a failure, and when a rank leaves
    int last = 0;                                      // the sender that was returned last
  };
  class QueuedWork;
  struct Departure {
    int64_t calls;  // that the rank made
    int rank_in_job;
    std::string who;
  };

  std::shared_ptr<Parts> parts() const;
  std::shared_ptr<Parts> parts_if_any() const;
  [[noreturn]] void refuse_destroyed() const;
  void leave(const std::shared_ptr<Parts>& parts);
  int64_t calls() const;
  std::chrono::milliseconds timeout_of(const CallOptions& options) const;

  /// Returns the queued call if the backend queues calls, else null.
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
  Failure mismatch_failure(const CallRecord& record, const std::string& mismatch,
                           const std::vector<Answer>& answers) const;
  Failure own_failure(ErrorKind kind, const std::string& message) const;
  std::exception_ptr departure_before(const CallId& call_id) const;
  void announce_send(const MessageRoute& route);
  void announce_all_sends(Job& job);
  std::optional<int> waiting_sender(uint32_t tag);
  void blame_departure(const std::exception_ptr& cause);
  std::string flight_recorder_suffix(const std::exception_ptr& cause);

  void on_failure(std::exception_ptr cause) override;
  void on_left(int rank_in_job, int64_t calls) override;
  bool on_note(int rank_in_job, const std::string& content) override;
  void on_answers(const std::string& call_id, const std::vector<Answer>& answers) override;
  void on_tick() override;

  const OwnerProcess owner_{};
  const Membership membership_;
  const int rank_in_job_;
  const std::shared_ptr<FlightRecorder> recorder_;
  const std::shared_ptr<Activity> activity_;
  const bool is_queueing_;  // the backend queues calls on a device
  const std::shared_ptr<Group> cpu_group_;
  std::mutex& mutex_;  // the recorder's
  QueuedCalls queued_{*recorder_};
  std::shared_ptr<Parts> parts_;              // guarded by mutex_; null once destroyed
  std::exception_ptr failure_;                // guarded by mutex_
  std::vector<Watched*> watched_;             // guarded by mutex_
  std::optional<Departure> departure_;        // guarded by mutex_: the one with the fewest calls
  bool departure_came_first_ = false;         // guarded by mutex_: departure_ was set before failure_
  std::set<int> left_;                        // guarded by mutex_: ranks that have left the group
  std::map<MessageRoute, int64_t> messages_;  // guarded by mutex_: messages so far
  AnySender any_sender_;
  std::map<Operation, int64_t> aside_;                // guarded by mutex_: number of run_aside calls
  int children_ = 0;                                  // guarded by mutex_
  std::shared_ptr<Group> side_group_;                 // guarded by mutex_
  int64_t calls_ = 0;                                 // guarded by mutex_: collectives started
  WorkQueue queue_{mutex_, rank_in_job_, activity_};  // last, because its tasks use all members above
};

}  // namespace lockstep::detail
