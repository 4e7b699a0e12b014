#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <ostream>

namespace lockstep {

/// The variable with the path of the file that a test and the ranks under attack map.
inline constexpr const char* kControlVariable = "LOCKSTEP_TEST_ATTACK_CONTROL";

/// How a rank under attack ended.
enum class RankOutcome : int { kNone = 0, kDone, kPeerError, kOtherError, kWrongResult };

inline std::ostream& operator<<(std::ostream& out, RankOutcome outcome) {
  constexpr const char* kNames[] = {"none", "done", "PeerError", "another error", "wrong result"};
  return out << kNames[static_cast<int>(outcome)];
}

/// What a rank under attack reports.
struct RankProgress {
  std::atomic<int64_t> pid;
  std::atomic<int64_t> steps;        // completed and verified
  std::atomic<int64_t> held;         // steps in which it obeyed Control::should_hold
  std::atomic<int64_t> clock_jumps;  // changes of the system's time by more than half an hour
  std::atomic<RankOutcome> outcome;
  std::atomic<int> culprit;         // of the error; -1: unknown
  std::atomic<int64_t> told_at_ns;  // when a call threw an error, by the monotonic clock
};

/// The memory that a test shares with the ranks under attack, independent of lockstep. Zero at the beginning.
struct Control {
  static constexpr int kMaxRanks = 4;

  std::atomic<bool> should_stop;          // rank 0 obeys, after which all ranks end
  std::atomic<bool> should_hold;          // rank 1 waits before its next step
  std::atomic<bool> should_eat;           // rank 1 allocates memory without end
  std::atomic<int64_t> clock_shift_s;     // obeyed by shifted_clock.cpp
  std::atomic<int64_t> clock_is_shifted;  // calls that shifted_clock.cpp has answered
  RankProgress ranks[kMaxRanks];
};
static_assert(std::atomic<int64_t>::is_always_lock_free);

/// Maps the file, which must exist with the size of Control. Returns null on failure.
inline Control* map_control(const char* path) {
  const int file = ::open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return nullptr;
  void* memory = ::mmap(nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  return memory == MAP_FAILED ? nullptr : static_cast<Control*>(memory);
}

}  // namespace lockstep
