#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>

#include <lockstep/backend.h>

#include "backends/shm/rank_segment.h"

namespace lockstep::shm {

/// How the threads of one rank wait for what other ranks write: they look a while, then let others run, then sleep
/// until the futex of their segment rings. Thread-safe.
class Waiter {
 public:
  /// Whether there is a core for every rank: else looking longer would keep others from running.
  enum class Cores { kEnough, kTooFew };

  Waiter(RankSegment& mine, Cores cores);

  /// What threads that wait long do now and then. Before any waits.
  void meanwhile(std::function<void()> errand) { errand_ = std::move(errand); }

  /// Returns when `is_ready` says so. TimeoutError naming `peer` after the deadline; what abort was given, once
  /// aborted.
  template <class IsReady>
  void until(const IsReady& is_ready, int peer, Deadline deadline) {
    for (int look = 0; look < looks_; ++look) {
      if (is_ready()) return;
      relax();
    }
    wait_long(is_ready, peer, deadline);
  }

  void abort(std::exception_ptr cause);

  /// Wakes the threads that sleep at a segment. Call after writing what they wait for. It must be written, and looked
  /// at by `is_ready`, in sequentially consistent order: then the writer sees the sleeper, or the sleeper what was
  /// written.
  static void wake(RankSegment& segment) {
    if (segment.sleepers.load() > 0) wake_sleepers(segment);
  }

 private:
  static void relax() {
#if defined(__aarch64__)
    asm volatile("isb");  // longer than yield, which most processors take for nothing
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  static void wake_sleepers(RankSegment& segment);
  void wait_long(const std::function<bool()>& is_ready, int peer, Deadline deadline);
  void throw_if_aborted();

  RankSegment& mine_;
  const int looks_;
  std::function<void()> errand_;  // constant once threads wait
  std::atomic<bool> is_aborted_{false};
  std::mutex mutex_;
  std::exception_ptr cause_;  // guarded by mutex_
};

}  // namespace lockstep::shm
