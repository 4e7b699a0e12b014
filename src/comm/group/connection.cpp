#include "comm/group/connection.h"

#include <utility>

#include <lockstep/error.h>

#include "base/owner_process.h"
#include "base/text.h"

namespace lockstep::detail {

Connection::Connection(const Membership& group, std::mutex& mutex, std::shared_ptr<Job> job,
                       std::unique_ptr<Backend> backend)
    : group_(group),
      mutex_(mutex),
      parts_(std::make_shared<Parts>(
          Parts{std::move(job), std::shared_ptr<Backend>(backend.release(), DeleteInOwner())})) {}

std::shared_ptr<const Connection::Parts> Connection::parts_if_any() const {
  std::lock_guard lock(mutex_);
  return parts_;
}

std::shared_ptr<const Connection::Parts> Connection::parts() const {
  auto parts = parts_if_any();
  if (!parts) refuse_closed();
  return parts;
}

std::shared_ptr<Backend> Connection::backend() const {
  const auto parts = this->parts();
  if (!parts->backend)
    throw UsageError(text("rank ", parts->job->rank(), " of the job is not in group '", group_.name,
                          "', which has ranks ", enumerate(ranks_in_job(group_)),
                          "; check contains_me() before the call"));
  return parts->backend;
}

Backend& Connection::open_backend() const {
  if (!parts_) refuse_closed();
  return *parts_->backend;
}

void Connection::close() {
  std::shared_ptr<const Parts> parts;  // destroyed without the mutex
  std::lock_guard lock(mutex_);
  parts = std::exchange(parts_, nullptr);
}

void Connection::refuse_closed() const {
  throw UsageError(text("group '", group_.name, "' was destroyed; create a new one"));
}

}  // namespace lockstep::detail
