#include "comm/group/queued_calls.h"

#include <thread>
#include <utility>

#include <lockstep/error.h>

namespace lockstep::detail {
namespace {

constexpr size_t kMany = 64;  // from there on, whoever adds a call looks which are done
constexpr auto kDevicePause = std::chrono::microseconds(200);
constexpr auto kLongestEnd = std::chrono::milliseconds(500);

/// Without saying what is wrong, if something is: that is told to whoever looks after the calls.
bool is_done(QueuedCall& call) {
  try {
    return call.is_done();
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

void QueuedCalls::add(Entry entry) {
  size_t count = 0;
  {
    std::lock_guard lock(recorder_.mutex());
    entries_.push_back(std::move(entry));
    count = entries_.size();
  }
  if (count >= kMany) retire();
}

// The device is asked, and tensors go, without the mutex.
void QueuedCalls::retire() {
  for (;;) {
    std::shared_ptr<QueuedCall> oldest;
    {
      std::lock_guard lock(recorder_.mutex());
      if (entries_.empty()) return;
      oldest = entries_.front().call;
    }
    if (!oldest->is_done()) return;
    std::optional<Entry> done;
    std::lock_guard lock(recorder_.mutex());
    if (entries_.empty() || entries_.front().call != oldest) continue;  // another thread was sooner
    recorder_.change(entries_.front().record.ticket, CallRecord::State::kDone);
    done = std::move(entries_.front());
    entries_.pop_front();
  }
}

void QueuedCalls::release_tensors(const QueuedCall& call) {
  std::shared_ptr<const void> kept;
  std::lock_guard lock(recorder_.mutex());
  for (auto& entry : entries_)
    if (entry.call.get() == &call) kept = std::exchange(entry.kept, nullptr);
}

void QueuedCalls::synchronize() {
  for (const auto& call : calls())
    if (!is_done(*call)) call->synchronize();
}

void QueuedCalls::await_end() {
  const auto deadline = std::chrono::steady_clock::now() + kLongestEnd;
  for (const auto& call : calls())
    while (!is_done(*call)) {
      if (std::chrono::steady_clock::now() > deadline) return;
      std::this_thread::sleep_for(kDevicePause);
    }
}

std::vector<std::shared_ptr<QueuedCall>> QueuedCalls::calls() {
  std::lock_guard lock(recorder_.mutex());
  std::vector<std::shared_ptr<QueuedCall>> result;
  for (const auto& entry : entries_) result.push_back(entry.call);
  return result;
}

}  // namespace lockstep::detail
