#include "backends/shm/wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep::shm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPolls = 2000;  // some tens of microseconds
constexpr auto kYielding = std::chrono::microseconds(200);
constexpr auto kMaxSleep = std::chrono::seconds(60);

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, std::chrono::nanoseconds limit) {
  auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  timespec time{static_cast<time_t>(seconds.count()), static_cast<long>((limit - seconds).count())};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, expected, &time, nullptr, 0);
}

}  // namespace

Waiter::Waiter(RankSegment& segment, Cores cores) : segment_(segment), polls_(cores == Cores::kEnough ? kPolls : 1) {}

void Waiter::wake_sleepers(RankSegment& segment) {
  segment.futex.fetch_add(1);
  ::syscall(SYS_futex, &segment.futex, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Waiter::abort(std::exception_ptr cause) {
  {
    std::lock_guard lock(mutex_);
    if (!cause_) cause_ = std::move(cause);
  }
  is_aborted_ = true;
  wake_sleepers(segment_);
}

void Waiter::throw_if_aborted() {
  if (!is_aborted_) return;
  std::lock_guard lock(mutex_);
  std::rethrow_exception(cause_);
}

void Waiter::wait_long(const std::function<bool()>& is_ready, int peer, Deadline deadline) {
  for (auto begin = Clock::now(); Clock::now() - begin < kYielding;) {
    if (is_ready()) return;
    throw_if_aborted();
    if (background_work_) background_work_();
    ::sched_yield();
  }
  struct Sleeper {
    explicit Sleeper(RankSegment& segment) : segment(segment) { segment.sleepers.fetch_add(1); }
    ~Sleeper() { segment.sleepers.fetch_sub(1); }
    RankSegment& segment;
  } sleeper(segment_);
  for (;;) {
    uint32_t futex = segment_.futex.load();  // a wake-up after this load makes futex_wait return at once
    if (background_work_) background_work_();
    if (is_ready()) return;
    throw_if_aborted();
    auto now = Clock::now();
    if (now >= deadline) throw TimeoutError(text("timed out: rank ", peer, " did not reach this call"));
    futex_wait(segment_.futex, futex, std::min<Clock::duration>(deadline - now, kMaxSleep));
  }
}

}  // namespace lockstep::shm
