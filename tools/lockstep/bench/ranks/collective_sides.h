#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include <lockstep/process_group.h>

#include "bench/rank_protocol.h"
#include "bench/ranks/rounds.h"
#include "bench/ranks/shared_page.h"

namespace lockstep::bench {

/// Reads and writes every byte of the rank's own memory once, in place, which is the minimum for any in-place
/// reduction. Uses one buffer per call of a sample, like the collectives.
class MemoryStream final : public Side {
 public:
  MemoryStream(int64_t bytes, int calls);
  ~MemoryStream() override;
  MemoryStream(const MemoryStream&) = delete;
  MemoryStream& operator=(const MemoryStream&) = delete;

  void prepare(int64_t seed) override;
  void warm_up() override { stream(memory_); }
  void run() override;
  int64_t count_wrong() override { return 0; }

 private:
  void stream(float* slot) const;

  const int64_t count_;   // floats in a buffer
  const int64_t stride_;  // floats from one buffer to the next
  const int calls_;
  const size_t mapped_bytes_;
  float* memory_ = nullptr;
};

/// Calls of one collective, except barrier, with one backend, message size and kind of memory.
std::unique_ptr<Side> make_collective(const CollectivePlan& plan, const ProcessGroup& group, Memory memory,
                                      int64_t bytes);

/// Whether ProcessGroup::allocate returns memory of the backend, not of LibTorch's allocator.
bool has_own_memory(const ProcessGroup& group);

/// Barriers of one backend. To check that they block, one rank arrives late at an extra, untimed barrier; each rank
/// that passes it earlier counts as one wrong element.
std::unique_ptr<Side> make_barrier(const ProcessGroup& group, SharedPage& page);

}  // namespace lockstep::bench
