#include "comm/group.h"

#include <lockstep/error.h>

#include "base/log.h"
#include "base/rethrow.h"
#include "base/text.h"

namespace lockstep::detail {

Group::Group(Membership membership, std::shared_ptr<Store> store, std::unique_ptr<Backend> backend)
    : membership_(std::move(membership)), store_(std::move(store)), backend_(std::move(backend)) {}

Group::~Group() {
  size_t pending = queue_.pending();
  if (pending == 0) return;
  log_warning(text("rank ", membership_.rank, ": the process group was destroyed with ", pending,
                   " calls pending; wait() for each asynchronous call before the group goes"));
  abort(std::make_exception_ptr(PeerError("the process group was destroyed on this rank")));
}

void Group::throw_if_broken(const char* name) {
  std::exception_ptr failure;
  {
    std::lock_guard lock(mutex_);
    failure = failure_;
  }
  if (failure)
    rethrow_with_prefix(failure,
                        text("rank ", membership_.rank, ": ", name, ": the group is broken by an earlier error: "));
}

void Group::guard(const char* name, const std::function<void(Deadline)>& body) {
  throw_if_broken(name);
  try {
    body(std::chrono::steady_clock::now() + membership_.timeout);
  } catch (...) {
    // The other ranks may be in the middle of this call, so that none after it can succeed: the group is over.
    auto cause = std::current_exception();
    abort(cause);
    rethrow_with_prefix(cause, text("rank ", membership_.rank, ": ", name, ": "));
  }
}

void Group::run(const char* name, const Call& call) {
  queue_.run([&] { guard(name, [&](Deadline deadline) { call(*backend_, deadline); }); });
}

Work Group::submit(const char* name, Call call) {
  return Work(queue_.submit(
      [this, name, call = std::move(call)] { guard(name, [&](Deadline deadline) { call(*backend_, deadline); }); }));
}

void Group::abort(std::exception_ptr cause) {
  {
    std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = cause;
  }
  backend_->abort(cause);
}

}  // namespace lockstep::detail
