#pragma once

#include <cstddef>
#include <cstdint>

#include "bench/ranks/side.h"

namespace lockstep::bench {

/// Reads and writes every byte of a rank's own memory once, in place: what no reduction in place can do with less.
/// As many buffers as a sample has calls, one after the other, as the collectives have them.
class MemoryStream final : public Side {
 public:
  MemoryStream(int64_t bytes, int calls);
  ~MemoryStream() override;
  MemoryStream(const MemoryStream&) = delete;
  MemoryStream& operator=(const MemoryStream&) = delete;

  void prepare(int64_t turn) override;
  void warm_up() override { stream(memory_); }
  void run() override;
  int64_t count_wrong() override { return 0; }

 private:
  void stream(float* slot) const;

  const int64_t count_;   // floats in a buffer
  const int64_t stride_;  // floats from one to the next
  const int calls_;
  const size_t mapped_bytes_;
  float* memory_ = nullptr;
};

}  // namespace lockstep::bench
