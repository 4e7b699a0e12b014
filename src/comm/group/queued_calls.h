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

/// The calls of a group that a device still works on, oldest first: each waits for the one before it, unless a graph
/// captures it. Thread-safe; what is noted about calls is guarded by the recorder's mutex.
class QueuedCalls {
 public:
  struct Entry {
    CallRecord record;
    std::shared_ptr<QueuedCall> call;
    std::shared_ptr<const void> kept;  // its tensors
    std::chrono::milliseconds timeout;
    Backoff backoff;
  };

  explicit QueuedCalls(FlightRecorder& recorder) : recorder_(recorder) {}

  void add(Entry entry);
  /// Notes that calls are done which are, and lets go of their tensors. Throws as QueuedCall::is_done does.
  void retire();
  /// Lets go of the tensors of a call that the stream which may use their memory next is ordered after.
  void release_tensors(const QueuedCall& call);
  /// Returns when the device is done with all calls so far.
  void synchronize();
  /// After an abort: returns when the device has let go of all of them, so that their memory may be used again, or when
  /// it should have.
  void await_end();

  /// Both with the recorder's mutex held.
  Entry* oldest() { return entries_.empty() ? nullptr : &entries_.front(); }
  const std::deque<Entry>& entries() const { return entries_; }

 private:
  std::vector<std::shared_ptr<QueuedCall>> calls();

  FlightRecorder& recorder_;
  std::deque<Entry> entries_;  // guarded by the recorder's mutex
};

}  // namespace lockstep::detail
