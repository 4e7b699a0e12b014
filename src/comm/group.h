#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include <c10/core/Device.h>

#include <lockstep/backend.h>
#include <lockstep/work.h>

#include "comm/work_queue.h"

namespace lockstep::detail {

/// Constant facts about a rank's place in a group.
struct Membership {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  c10::Device device{c10::kCPU};
  std::string backend_name;
  std::chrono::milliseconds timeout{};
};

/// What all handles of one group share: the backend, the order of calls, and whether the group still works.
/// Thread-safe.
class Group {
 public:
  /// A checked call, ready to be made. It must not hold a handle of the group, which would then outlive its last user.
  using Call = std::function<void(Backend&, Deadline)>;

  Group(Membership membership, std::shared_ptr<Store> store, std::unique_ptr<Backend> backend);
  ~Group();

  const Membership& membership() const { return membership_; }
  Backend& backend() { return *backend_; }

  /// Makes the call in its turn. `name` must be a literal.
  void run(const char* name, const Call& call);
  Work submit(const char* name, Call call);

  /// For calls outside the order of collectives: runs `body` now, and breaks the group when it throws.
  void guard(const char* name, const std::function<void(Deadline)>& body);

  /// Breaks the group: see Backend::abort. In two steps for those who break several groups at once, so that none takes
  /// the closed connections of another for the cause.
  void abort(std::exception_ptr cause);
  /// Calls fail from here on with the cause, or with the earlier one that there is; returns which.
  std::exception_ptr mark_broken(std::exception_ptr cause);
  /// Wakes the calls that wait.
  void wake();

 private:
  std::exception_ptr failure();

  const Membership membership_;
  const std::shared_ptr<Store> store_;  // kept open for as long as the group lives
  std::mutex mutex_;
  std::exception_ptr failure_;  // guarded by mutex_
  const std::unique_ptr<Backend> backend_;
  WorkQueue queue_;  // last: its tasks use all of the above
};

}  // namespace lockstep::detail
