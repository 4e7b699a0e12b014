#include "comm/group/queued_calls.h"

#include <mutex>
#include <thread>
#include <utility>

#include <lockstep/error.h>

#include "base/text.h"

// Calls of a backend that queues on a device (NCCL). Group::execute queues a call, adds it here and returns; the device
// runs the call later. No thread blocks on such a call, so a hang or an error would go unnoticed. Instead:
//
// - The job's thread calls CallWatch::on_tick regularly. It retires finished calls and reports errors of the device to
//   the store. If the oldest call takes long, it asks the other ranks about that call. The answers
//   (CallWatch::on_answers) lead to a MismatchError, a TimeoutError or a warning.
// - An entry keeps the tensors of its call alive until the device is done with them, or until Work::wait() has ordered
//   the caller's stream after the call: LibTorch's allocator reuses memory in stream order.
// - Work::wait() orders only the current stream after the call. Work::synchronize() blocks the host.
// - After an abort await_end() waits until the device has stopped using the tensors, before the caller sees the error.

namespace lockstep::detail {
namespace {

constexpr size_t kMany = 64;  // from this number of calls on, add() retires finished calls
constexpr auto kDevicePause = std::chrono::microseconds(200);
constexpr auto kMaxEnd = std::chrono::milliseconds(500);

/// Treats errors as "not done". CallWatch::retire_queued reports them.
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

// Queries the device and frees tensors without the mutex.
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
    if (entries_.empty() || entries_.front().call != oldest) continue;  // another thread has retired it
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
  const auto deadline = std::chrono::steady_clock::now() + kMaxEnd;
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
