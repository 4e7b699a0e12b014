#include "bench/ranks/memory_stream.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include <lockstep/error.h>

#include "bench/ranks/slots.h"

namespace lockstep::bench {
namespace {

constexpr size_t kHugePage = 2 << 20;

/// Two streams: one alone leaves a third of the bandwidth of some processors unused.
void scale(float* __restrict first, float* __restrict second, int64_t count, float factor) {
  for (int64_t i = 0; i < count; ++i) {
    first[i] *= factor;
    second[i] *= factor;
  }
}

}  // namespace

MemoryStream::MemoryStream(int64_t bytes, int calls)
    : count_(std::max<int64_t>(1, bytes / static_cast<int64_t>(sizeof(float)))),
      stride_(slot_stride(count_, sizeof(float), calls)),
      calls_(calls),
      mapped_bytes_((static_cast<size_t>(stride_ * calls) * sizeof(float) + kHugePage - 1) / kHugePage * kHugePage) {
  void* memory = ::mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw SystemError(fmt::format("mmap of {} bytes: {}", mapped_bytes_, std::strerror(errno)));
  ::madvise(memory, mapped_bytes_, MADV_HUGEPAGE);  // the floor should not pay for small pages
  memory_ = static_cast<float*>(memory);
}

MemoryStream::~MemoryStream() {
  ::munmap(memory_, mapped_bytes_);
}

void MemoryStream::prepare(int64_t turn) {
  std::fill_n(memory_, stride_ * calls_, static_cast<float>(turn % 100));
}

void MemoryStream::run() {
  for (int call = 0; call < calls_; ++call) stream(memory_ + call * stride_);
}

void MemoryStream::stream(float* slot) const {
  volatile float one = 1;  // unknown to the compiler, which would leave the loop out
  const float factor = one;
  const int64_t half = count_ / 2;
  scale(slot, slot + half, half, factor);
  if (count_ % 2 != 0) slot[count_ - 1] *= factor;
}

}  // namespace lockstep::bench
