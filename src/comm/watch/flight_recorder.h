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

/// Writes a new flight recorder file into LOCKSTEP_FLIGHT_DIR, or else into a private folder of this user in TMPDIR or
/// /tmp, where only the newest files are kept. Never opens or waits for files of other users, who may be able to write
/// to these folders. Returns the path. Throws Error when the file cannot be written.
std::string write_flight_file(int rank, const std::string& content);

/// The record of one call.
struct CallRecord {
  enum class State {
    kPosted,  // a message that no thread waits for yet
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
/// "train.cpp:7"; for calls that lockstep itself makes: their purpose, or "comm/strings.cpp:56, inside lockstep".
std::string describe(const CallSite& site);

/// Keeps the last calls of one rank in all groups, and older calls that are still running. Thread-safe, except for
/// begin() and change().
class FlightRecorder {
 public:
  static constexpr size_t kCalls = 256;

  /// Guards the records and the bookkeeping of groups, so that the beginning and the end of a call take one lock each.
  std::mutex& mutex() const { return mutex_; }

  /// begin() records the call and returns its ticket, which change() takes. Both require the mutex.
  uint64_t begin(const CallRecord& record);
  void change(uint64_t ticket, CallRecord::State state);

  /// Returns the call with that id, in the form of describe(CallId), if it is still recorded.
  std::optional<CallRecord> find(const std::string& group, const std::string& call_id) const;

  /// Describes what the rank is doing now: "in barrier(), call 7 ... for 0.2 s" or "outside of any call for 3 s; ...".
  std::string doing() const;

  /// Oldest first.
  std::vector<CallRecord> records() const;

  /// The newest or the oldest call that is running, if any.
  enum class Which { kNewest, kOldest };
  std::optional<CallRecord> running(Which which) const;

  /// The path of the file that has the records, or why it could not be written. Empty before that.
  std::string file() const;
  void set_file(std::string path);

 private:
  mutable std::mutex mutex_;
  std::vector<CallRecord> ring_;            // guarded by mutex_: ticket t is at (t - 1) % kCalls
  std::map<uint64_t, CallRecord> evicted_;  // guarded by mutex_: older unfinished calls, by ticket
  uint64_t tickets_ = 0;                    // guarded by mutex_
  std::string file_;                        // guarded by mutex_
};

/// Formats a call as one line of the flight recorder's file, without a newline.
std::string to_json(const CallRecord& record, std::chrono::steady_clock::time_point now);

/// Writes the calls as JSON into a new file (write_flight_file): a header line, then one object per line. Returns the
/// path, or the reason why the file could not be written.
std::string dump(const FlightRecorder& recorder, int rank, const std::string& reason);

}  // namespace lockstep::detail
