#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/call_options.h>

#include "comm/watch/fingerprint.h"

namespace lockstep::detail {

/// Writes a new file of a rank's flight recorder into LOCKSTEP_FLIGHT_DIR, or else into a folder of this user's in
/// TMPDIR or /tmp, where only the newest files are kept. Other users may write to those places: no file of theirs is
/// opened, and none can block the rank. Returns the path; throws Error when it cannot be written.
std::string write_flight_file(int rank, const std::string& content);

/// One call, as it is remembered.
struct CallRecord {
  enum class State {
    kPosted,  // a message that nobody waits for yet
    kRunning,
    kDone,
    kFailed,
  };

  uint64_t ticket = 0;  // counts all calls of this rank, from 1
  std::string group{};
  CallId call_id{};
  Fingerprint call{};
  CallSite site{"", 0};
  State state = State::kRunning;
  std::chrono::steady_clock::time_point started = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point ended{};
};

/// "all_reduce(sum, Float[4]), call 5 of group 'world' at train.cpp:40".
std::string describe(const CallRecord& record);

/// The last calls of one rank, over all groups, and older ones that still run. Thread-safe but for begin() and
/// change().
class FlightRecorder {
 public:
  static constexpr size_t kCalls = 256;

  /// Guards the records, and all that groups note when a call begins and ends, which so takes one lock each.
  std::mutex& mutex() const { return mutex_; }

  /// Remembers the call, and gives it its ticket, for change(). Both with the mutex held.
  uint64_t begin(const CallRecord& record);
  void change(uint64_t ticket, CallRecord::State state);

  /// The call of that call_id, if it is remembered.
  std::optional<CallRecord> find(const std::string& group, const std::string& call_id) const;

  /// What the rank is doing now, for people: "in barrier(), call 7 ... for 0.2 s" or "outside of any call for 3 s,
  /// ...".
  std::string doing() const;

  /// Oldest first.
  std::vector<CallRecord> records() const;

 private:
  mutable std::mutex mutex_;
  std::vector<CallRecord> ring_;          // guarded by mutex_: ticket t is at (t - 1) % kCalls
  std::map<uint64_t, CallRecord> aside_;  // guarded by mutex_: older ones that have not ended, by ticket
  uint64_t tickets_ = 0;                  // guarded by mutex_
};

/// Writes the calls as JSON, one object a line after a header, into a new file (comm/watch/flight_file.h). Returns the
/// path, or why there is none.
std::string dump(const FlightRecorder& recorder, int rank, const std::string& reason);

}  // namespace lockstep::detail
