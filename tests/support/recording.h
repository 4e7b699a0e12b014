#pragma once

#include "comm/watch/flight_recorder.h"

namespace lockstep::detail {

/// FlightRecorder::begin, with the mutex held.
inline uint64_t begin(FlightRecorder& recorder, const CallRecord& record) {
  std::lock_guard lock(recorder.mutex());
  return recorder.begin(record);
}

/// FlightRecorder::change, with the mutex held.
inline void change(FlightRecorder& recorder, uint64_t ticket, CallRecord::State state) {
  std::lock_guard lock(recorder.mutex());
  recorder.change(ticket, state);
}

}  // namespace lockstep::detail
