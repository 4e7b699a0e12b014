#include "bench/ranks/shared_page.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>

#include <fmt/format.h>

#include <lockstep/error.h>

#include "bench/rank_protocol.h"

namespace lockstep::bench {
namespace {

/// Behind a sample: who is done first must not keep the core from threads of a backend that others still wait for.
constexpr int kYieldAtOnce = 0;

void relax() {
#if defined(__aarch64__)
  asm volatile("isb");
#elif defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

CommonPage::CommonPage(const std::string& path, int rank, int ranks, bool is_crowded)
    : rank_(rank), ranks_(ranks), patience_(is_crowded ? 0 : 5000) {
  static_assert(sizeof(Line) == 128 && std::atomic<uint64_t>::is_always_lock_free);
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  const auto bytes = static_cast<size_t>(page_bytes(ranks));
  void* memory = file < 0 ? MAP_FAILED : ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED)
    throw SystemError(fmt::format("the ranks' common page {} cannot be mapped: {}", path, std::strerror(errno)));
  ::close(file);
  lines_ = static_cast<Line*>(memory);
}

CommonPage::~CommonPage() {
  ::munmap(lines_, static_cast<size_t>(page_bytes(ranks_)));
}

void CommonPage::wait_until(const Line& line, uint64_t value, int patience) const {
  for (int looked = 0; line.value.load(std::memory_order_acquire) != value; ++looked) {
    if (looked < patience)
      relax();
    else
      ::sched_yield();
  }
}

/// Whether this rank is the last, which begins the next generation.
bool CommonPage::arrive(uint64_t generation) {
  if (lines_[kArrived].value.fetch_add(1, std::memory_order_acq_rel) + 1 != static_cast<uint64_t>(ranks_)) return false;
  lines_[kArrived].value.store(0, std::memory_order_relaxed);
  lines_[kGeneration].value.store(generation + 1, std::memory_order_release);
  return true;
}

void CommonPage::meet(int patience) {
  const uint64_t generation = lines_[kGeneration].value.load(std::memory_order_acquire);
  if (!arrive(generation)) wait_until(lines_[kGeneration], generation + 1, patience);
}

void CommonPage::meet_asleep() {
  static_assert(std::endian::native == std::endian::little);  // a futex is the lower half of a number
  auto& line = lines_[kGeneration].value;
  const uint64_t generation = line.load(std::memory_order_acquire);
  if (arrive(generation)) {
    ::syscall(SYS_futex, &line, FUTEX_WAKE, ranks_, nullptr, nullptr, 0);
    return;
  }
  while (line.load(std::memory_order_acquire) == generation)
    ::syscall(SYS_futex, &line, FUTEX_WAIT, static_cast<uint32_t>(generation), nullptr, nullptr, 0);
}

double CommonPage::largest(double mine) {
  post(std::bit_cast<int64_t>(mine));
  meet(kYieldAtOnce);
  double most = mine;
  for (int rank = 0; rank < ranks_; ++rank) most = std::max(most, std::bit_cast<double>(posted(rank)));
  meet(kYieldAtOnce);  // all have read
  return most;
}

int64_t CommonPage::sum(int64_t mine) {
  post(mine);
  meet(kYieldAtOnce);
  int64_t total = 0;
  for (int rank = 0; rank < ranks_; ++rank) total += posted(rank);
  meet(kYieldAtOnce);
  return total;
}

int64_t CommonPage::decided(int64_t mine) {
  return sum(rank_ == 0 ? mine : 0);
}

double CommonPage::bounce(int times) {
  const uint64_t before = lines_[kReturn].value.load(std::memory_order_acquire);
  meet();
  const auto begin = std::chrono::steady_clock::now();
  for (uint64_t ball = before + 1; ranks_ > 1 && rank_ < 2 && ball <= before + static_cast<uint64_t>(times); ++ball) {
    if (rank_ == 0) lines_[kServe].value.store(ball, std::memory_order_release);
    wait_until(lines_[rank_ == 0 ? kReturn : kServe], ball, patience_);
    if (rank_ == 1) lines_[kReturn].value.store(ball, std::memory_order_release);
  }
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
  meet();
  return ranks_ > 1 ? took.count() / times : 0;
}

}  // namespace lockstep::bench
