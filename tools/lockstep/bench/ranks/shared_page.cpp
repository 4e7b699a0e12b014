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

/// After a sample: a rank that finishes first must not block the core for backend threads that other ranks still need.
constexpr int kNoSpins = 0;

void cpu_relax() {
#if defined(__aarch64__)
  asm volatile("isb");
#elif defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

SharedPage::SharedPage(const std::string& path, int rank, int ranks, bool oversubscribed)
    : rank_(rank), ranks_(ranks), spins_(oversubscribed ? 0 : 5000) {
  static_assert(sizeof(CacheLine) == 128 && std::atomic<uint64_t>::is_always_lock_free);
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  const auto bytes = static_cast<size_t>(page_bytes(ranks));
  void* memory = file < 0 ? MAP_FAILED : ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED)
    throw SystemError(fmt::format("cannot map the shared page {}: {}", path, std::strerror(errno)));
  ::close(file);
  lines_ = static_cast<CacheLine*>(memory);
}

SharedPage::~SharedPage() {
  ::munmap(lines_, static_cast<size_t>(page_bytes(ranks_)));
}

void SharedPage::wait_until(const CacheLine& line, uint64_t value, int spins) const {
  for (int looked = 0; line.value.load(std::memory_order_acquire) != value; ++looked) {
    if (looked < spins)
      cpu_relax();
    else
      ::sched_yield();
  }
}

/// Returns whether this rank is the last to arrive; the last rank starts the next generation.
bool SharedPage::arrive(uint64_t generation) {
  if (lines_[kArrived].value.fetch_add(1, std::memory_order_acq_rel) + 1 != static_cast<uint64_t>(ranks_)) return false;
  lines_[kArrived].value.store(0, std::memory_order_relaxed);
  lines_[kGeneration].value.store(generation + 1, std::memory_order_release);
  return true;
}

void SharedPage::barrier(int spins) {
  const uint64_t generation = lines_[kGeneration].value.load(std::memory_order_acquire);
  if (!arrive(generation)) wait_until(lines_[kGeneration], generation + 1, spins);
}

void SharedPage::sleeping_barrier() {
  static_assert(std::endian::native == std::endian::little);  // the futex is the lower half of the 64-bit value
  auto& line = lines_[kGeneration].value;
  const uint64_t generation = line.load(std::memory_order_acquire);
  if (arrive(generation)) {
    ::syscall(SYS_futex, &line, FUTEX_WAKE, ranks_, nullptr, nullptr, 0);
    return;
  }
  while (line.load(std::memory_order_acquire) == generation)
    ::syscall(SYS_futex, &line, FUTEX_WAIT, static_cast<uint32_t>(generation), nullptr, nullptr, 0);
}

double SharedPage::max(double value) {
  publish(std::bit_cast<int64_t>(value));
  barrier(kNoSpins);
  double most = value;
  for (int rank = 0; rank < ranks_; ++rank) most = std::max(most, std::bit_cast<double>(published(rank)));
  barrier(kNoSpins);  // all ranks have read
  return most;
}

int64_t SharedPage::sum(int64_t value) {
  publish(value);
  barrier(kNoSpins);
  int64_t total = 0;
  for (int rank = 0; rank < ranks_; ++rank) total += published(rank);
  barrier(kNoSpins);
  return total;
}

int64_t SharedPage::broadcast(int64_t value) {
  return sum(rank_ == 0 ? value : 0);
}

double SharedPage::round_trip_us(int times) {
  const uint64_t before = lines_[kPong].value.load(std::memory_order_acquire);
  barrier();
  const auto begin = std::chrono::steady_clock::now();
  for (uint64_t sequence = before + 1; ranks_ > 1 && rank_ < 2 && sequence <= before + static_cast<uint64_t>(times);
       ++sequence) {
    if (rank_ == 0) lines_[kPing].value.store(sequence, std::memory_order_release);
    wait_until(lines_[rank_ == 0 ? kPong : kPing], sequence, spins_);
    if (rank_ == 1) lines_[kPong].value.store(sequence, std::memory_order_release);
  }
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
  barrier();
  return ranks_ > 1 ? took.count() / times : 0;
}

}  // namespace lockstep::bench
