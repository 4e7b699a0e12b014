#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <lockstep/backend.h>

#include "comm/group/backoff.h"
#include "comm/watch/flight_recorder.h"

namespace lockstep::detail {

/// The calls of a group that a device has not finished, oldest first. The device runs the calls in this order, except
/// for calls that are being captured into a CUDA graph, which do not run yet. Thread-safe. The mutex of the
/// FlightRecorder guards the entries.
class QueuedCalls {
 public:
  struct Entry {
    CallRecord record;
    std::shared_ptr<QueuedCall> call;
    std::shared_ptr<const void> kept;  // the tensors of the call
    std::chrono::milliseconds timeout;
    Backoff backoff;
  };

  explicit QueuedCalls(FlightRecorder& recorder) : recorder_(recorder) {}

  void add(Entry entry);
  /// Removes finished calls, records them as done and releases their tensors. Throws like QueuedCall::is_done.
  void retire();
  /// Releases the tensors of a call. Requires that the stream that may reuse their memory is ordered after the call.
  void release_tensors(const QueuedCall& call);
  /// Blocks until the device has finished all calls so far.
  void synchronize();
  /// Call it after an abort. Blocks until the device has finished all calls, so that their memory may be reused, but at
  /// most 500 ms.
  void await_end();

  /// Both require the recorder's mutex.
  Entry* oldest() { return entries_.empty() ? nullptr : &entries_.front(); }
  const std::deque<Entry>& entries() const { return entries_; }

 private:
  std::vector<std::shared_ptr<QueuedCall>> calls();

  FlightRecorder& recorder_;
  std::deque<Entry> entries_;  // guarded by the recorder's mutex
};

}  // namespace lockstep::detail
