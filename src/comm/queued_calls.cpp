#include "comm/queued_calls.h"

#include <utility>
#include <vector>

namespace lockstep::detail {
namespace {

constexpr size_t kMany = 64;  // from there on, whoever adds a call looks which are done

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
  std::vector<std::shared_ptr<QueuedCall>> calls;
  {
    std::lock_guard lock(recorder_.mutex());
    for (const auto& entry : entries_) calls.push_back(entry.call);
  }
  for (const auto& call : calls)
    if (!call->is_done()) call->synchronize();
}

}  // namespace lockstep::detail
