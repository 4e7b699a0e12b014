#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>

#include <lockstep/backend.h>

#include "backends/shm/rank_segment.h"

namespace lockstep::shm {

/// Blocks threads of one rank until other ranks have written a value: first spins, then yields, then sleeps on the
/// futex of the rank's segment. Thread-safe.
class Waiter {
 public:
  /// Whether every rank has a core. With fewer cores a spinning rank would keep other ranks from running.
  enum class Cores { kEnough, kTooFew };

  Waiter(RankSegment& segment, Cores cores);

  /// Sets work that threads do repeatedly during long waits. Call it before any thread waits.
  void set_background_work(std::function<void()> work) { background_work_ = std::move(work); }

  /// Blocks until `is_ready` returns true. Throws TimeoutError naming `peer` after the deadline, and the cause given to
  /// abort after an abort.
  template <class IsReady>
  void until(const IsReady& is_ready, int peer, Deadline deadline) {
    for (int poll = 0; poll < polls_; ++poll) {
      if (is_ready()) return;
      relax();
    }
    wait_long(is_ready, peer, deadline);
  }

  void abort(std::exception_ptr cause);

  /// Wakes the threads that sleep on the futex of a segment. Call it after writing the value that they wait for. The
  /// write, and the read in `is_ready`, must be sequentially consistent: then either the writer sees the sleeper, or
  /// the sleeper sees the value.
  static void wake(RankSegment& segment) {
    if (segment.sleepers.load() > 0) wake_sleepers(segment);
  }

 private:
  static void relax() {
#if defined(__aarch64__)
    asm volatile("isb");  // pauses longer than `yield`, which most processors treat as a no-op
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  static void wake_sleepers(RankSegment& segment);
  void wait_long(const std::function<bool()>& is_ready, int peer, Deadline deadline);
  void throw_if_aborted();

  RankSegment& segment_;
  const int polls_;
  std::function<void()> background_work_;  // constant once a thread waits
  std::atomic<bool> is_aborted_{false};
  std::mutex mutex_;
  std::exception_ptr cause_;  // guarded by mutex_
};

}  // namespace lockstep::shm
