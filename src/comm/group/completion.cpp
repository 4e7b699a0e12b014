#include "comm/group/completion.h"

#include <algorithm>
#include <thread>

#include <lockstep/error.h>
#include <lockstep/work.h>

#include "base/deadline.h"
#include "base/error.h"
#include "base/log.h"
#include "base/start_thread.h"

namespace lockstep {
namespace detail {

// Messages make progress in is_done(), and a device does not report when it is done. So this polls.
bool Completion::wait_until(std::chrono::steady_clock::time_point deadline) {
  constexpr std::chrono::microseconds kMaxPause(1000);
  for (std::chrono::microseconds pause(10); !is_done(); pause = std::min(2 * pause, kMaxPause)) {
    const auto now = std::chrono::steady_clock::now();
    if (now >= deadline) return false;
    std::this_thread::sleep_until(std::min(now + pause, deadline));
  }
  return true;
}

void Completion::on_done(Callback callback) {
  if (is_done()) return call_back(callback);
  run_in_background("the callback of a call",
                    [self = shared_from_this(), callback = std::move(callback)] { self->call_back(callback); });
}

void Completion::call_back(const Callback& callback) noexcept {
  std::exception_ptr error;
  try {
    await_result();
  } catch (...) {
    error = std::current_exception();
  }
  try {
    callback(error);
  } catch (...) {
    log_error(text("rank ", rank_in_job_, ": a callback of Work::on_done threw an exception, which is ignored: ",
                   message_of(std::current_exception())));
  }
}

}  // namespace detail

Work::Work(std::shared_ptr<detail::Completion> completion) : completion_(std::move(completion)) {}

void Work::wait() const {
  completion_->check_process();
  const detail::ActivityScope blocked(completion_->activity(), detail::Activity::Phase::kCommunication);
  completion_->wait();
}

bool Work::wait_for(std::chrono::milliseconds timeout) const {
  completion_->check_process();
  if (timeout < std::chrono::milliseconds(0))
    throw UsageError(text("Work::wait_for: the time-out is ", timeout.count(), " ms; it must not be negative"));
  const detail::ActivityScope blocked(completion_->activity(), detail::Activity::Phase::kCommunication);
  if (!completion_->wait_until(deadline_after(timeout))) return false;
  completion_->synchronize();
  return true;
}

void Work::synchronize() const {
  completion_->check_process();
  const detail::ActivityScope blocked(completion_->activity(), detail::Activity::Phase::kCommunication);
  completion_->synchronize();
}

bool Work::is_done() const {
  completion_->check_process();
  return completion_->is_done();
}

void Work::on_done(std::function<void(std::exception_ptr error)> callback) const {
  completion_->check_process();
  completion_->on_done(std::move(callback));
}

std::chrono::steady_clock::time_point Work::done_at() const {
  completion_->check_process();
  return completion_->done_at();
}

}  // namespace lockstep
