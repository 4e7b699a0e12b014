#pragma once

#include <memory>
#include <mutex>

#include <lockstep/backend.h>

#include "comm/group/membership.h"
#include "comm/watch/job.h"

namespace lockstep::detail {

/// A group's job and backend, until the group is destroyed. Thread-safe.
class Connection {
 public:
  struct Parts {
    std::shared_ptr<Job> job;
    std::shared_ptr<Backend> backend;  // null on a rank that is not a member
  };

  /// `group` and `mutex` must outlive the object.
  Connection(const Membership& group, std::mutex& mutex, std::shared_ptr<Job> job, std::unique_ptr<Backend> backend);

  /// Null after close().
  std::shared_ptr<const Parts> parts_if_any() const;
  /// Throws UsageError after close().
  std::shared_ptr<const Parts> parts() const;
  /// Throws UsageError after close(), and on a rank that is not a member.
  std::shared_ptr<Backend> backend() const;

  /// Both require the mutex. open_backend() throws UsageError after close().
  bool is_open() const { return parts_ != nullptr; }
  Backend& open_backend() const;

  void close();

 private:
  [[noreturn]] void refuse_closed() const;

  const Membership& group_;
  std::mutex& mutex_;
  std::shared_ptr<const Parts> parts_;  // guarded by mutex_
};

}  // namespace lockstep::detail
