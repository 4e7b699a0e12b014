#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include <lockstep/backend.h>
#include <lockstep/call_options.h>
#include <lockstep/work.h>

#include "base/owner_process.h"
#include "base/text.h"
#include "comm/group/call_watch.h"
#include "comm/group/connection.h"
#include "comm/group/membership.h"
#include "comm/group/messages.h"
#include "comm/group/queued_calls.h"
#include "comm/group/work_queue.h"
#include "comm/watch/fingerprint.h"
#include "comm/watch/job.h"

namespace lockstep::detail {

/// The state that all handles of one group share: its connection, the order of its calls, and why it is broken.
///
/// Each call has a CallId, which is the same on all ranks: collectives are numbered ("call 7"), and so are messages
/// between two ranks ("message 3 from rank 0 to rank 2 with tag 0"). A rank that waits long asks the other ranks about
/// the CallId, and so finds ranks that make a different call or none. Thread-safe.
class Group final : public std::enable_shared_from_this<Group> {
 public:
  /// A call whose arguments were checked. The body may refer to the tensors of the caller, or to objects that `kept`
  /// owns. It must not hold a handle of the group, because the group would then outlive its last user.
  struct Call {
    Fingerprint fingerprint;
    std::function<void(Backend&, const CallInfo&)> body;
    std::shared_ptr<const void> kept{};
  };

  /// Create it with make_shared_owned: a forked child must not destroy it. On a rank that is not a member the backend
  /// is null. `cpu_group` has the same ranks and handles tensors on the CPU. A failure of one group breaks both (see
  /// base_name), and both are destroyed together.
  Group(Membership membership, std::shared_ptr<Job> job, std::unique_ptr<Backend> backend,
        std::shared_ptr<Group> cpu_group = nullptr);
  ~Group();

  const Membership& membership() const { return membership_; }
  int rank_in_job() const { return rank_in_job_; }
  const std::shared_ptr<Activity>& activity() const { return activity_; }
  const std::shared_ptr<FlightRecorder>& recorder() const { return recorder_; }

  /// Throws UsageError in a forked child of this rank's process. Calls check this before they lock a mutex, because the
  /// mutex may be held by a thread that does not exist in the child.
  void check_process() const {
    if (!owner_.is_this()) owner_.refuse(text("rank ", rank_in_job_, "'s process"));
  }

  /// Returns the group for tensors on that device type: the cpu_group if it is for that type, else this group.
  Group& for_device(c10::DeviceType type);
  /// Returns the group for internal communication: the cpu_group if there is one, else this group.
  Group& for_control() { return for_device(c10::kCPU); }
  const std::shared_ptr<Group>& cpu_group() const { return cpu_group_; }

  /// A group of the same ranks with a separate order of calls, for lockstep's calls that must not wait for the calls of
  /// this group; null before make_side_group(). A failure of one group breaks both, and both are destroyed together.
  std::shared_ptr<Group> side_group() const;
  void set_side_group(std::shared_ptr<Group> group);

  /// Both throw UsageError when the group was destroyed; backend() also when this rank is not a member.
  std::shared_ptr<Job> job() const;
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
  void run_unordered(Operation operation, const CallOptions& options,
                     const std::function<void(const CallRecord&, std::chrono::milliseconds timeout)>& body);

  /// Blocks until a rank has started to send a message with this tag that this rank has not started to receive. Returns
  /// that rank, and the options with the rest of the time. Throws TimeoutError, which leaves the group usable.
  std::pair<int, CallOptions> await_sender(uint32_t tag, const CallOptions& options);

  /// The time-out of a call: that of the options, or of the group. Throws UsageError if it is not above 0.
  std::chrono::milliseconds timeout_of(const CallOptions& options) const;

  /// Why the group is broken; null if it is not.
  std::exception_ptr failure() const { return watch_.failure(); }
  /// Throws the failure if the group is broken.
  void check_working();
  /// Breaks the group: see CallWatch::abort.
  void abort(const std::exception_ptr& cause);

  /// Returns the number of the next subgroup of this group, counting from 1.
  int next_child();

  /// Waits for pending calls and leaves the group. The other ranks can make calls until one of them needs this rank.
  void destroy();

  // The parts of the group, for Message and for callers that break several groups at once.
  const Connection& connection() const { return connection_; }
  CallWatch& watch() { return watch_; }
  Messages& messages() { return messages_; }

 private:
  class QueuedWork;

  void leave(const Connection::Parts& parts);
  int64_t calls() const;

  /// Makes the call in its turn. Returns the queued call if the backend queues calls, else null.
  std::shared_ptr<QueuedCall> execute(WorkQueue::Lock& lock, const Call& call, const CallOptions& options,
                                      std::chrono::milliseconds timeout, Backend::Stream stream,
                                      std::shared_ptr<const void> kept);
  Work queue(const std::shared_ptr<const Call>& call, const CallOptions& options, std::chrono::milliseconds timeout);
  CallRecord begin_unordered(Operation operation, const CallOptions& options);

  const OwnerProcess owner_{};
  const Membership membership_;
  const int rank_in_job_;
  const std::shared_ptr<FlightRecorder> recorder_;
  const std::shared_ptr<Activity> activity_;
  const bool is_queueing_;  // the backend queues calls on a device
  const std::shared_ptr<Group> cpu_group_;
  std::mutex& mutex_;  // the recorder's
  Connection connection_;
  QueuedCalls queued_{*recorder_};
  CallWatch watch_{membership_, connection_, *recorder_, queued_};
  Messages messages_{membership_, connection_, mutex_};
  std::map<Operation, int64_t> unordered_calls_;      // guarded by mutex_: number of run_unordered calls
  int children_ = 0;                                  // guarded by mutex_
  std::shared_ptr<Group> side_group_;                 // guarded by mutex_
  int64_t calls_ = 0;                                 // guarded by mutex_: collectives started
  WorkQueue queue_{mutex_, rank_in_job_, activity_};  // last, because its tasks use all members above
};

}  // namespace lockstep::detail
