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
  abort(std::make_exception_ptr(PeerError(text("the process group was destroyed on rank ", membership_.rank))));
}

std::exception_ptr Group::failure() {
  std::lock_guard lock(mutex_);
  return failure_;
}

void Group::guard(const char* name, const std::function<void(Deadline)>& body) {
  std::string call = text("rank ", membership_.rank, ": ", name, ": ");
  if (auto earlier = failure()) rethrow_with_prefix(earlier, call + "the group is broken by an earlier error: ");
  try {
    body(std::chrono::steady_clock::now() + membership_.timeout);
  } catch (...) {
    // The other ranks may be in the middle of this call, so that none after it can succeed: the group is over.
    auto cause = mark_broken(std::current_exception());
    wake();
    if (!is_ours(cause)) std::rethrow_exception(cause);
    rethrow_with_prefix(cause, call);
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
  mark_broken(std::move(cause));
  wake();
}

std::exception_ptr Group::mark_broken(std::exception_ptr cause) {
  std::lock_guard lock(mutex_);
  if (!failure_) failure_ = std::move(cause);
  return failure_;
}

void Group::wake() {
  backend_->abort(failure());
}

}  // namespace lockstep::detail
