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

/// Reads and writes every byte of a rank's own memory once, in place: what no reduction in place can do with less.
/// As many buffers as a sample has calls, one after the other, as the collectives have them.
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
  const int64_t stride_;  // floats from one to the next
  const int calls_;
  const size_t mapped_bytes_;
  float* memory_ = nullptr;
};

/// Calls of one collective, a barrier excepted, of one backend on messages of one size, in one kind of memory.
std::unique_ptr<Side> make_collective(const CollectivePlan& plan, const ProcessGroup& group, Memory memory,
                                      int64_t bytes);

/// Whether the group's memory is another than LibTorch's own.
bool has_own_memory(const ProcessGroup& group);

/// Barriers of one backend. To check that they wait, one rank comes late, by turns, to one more that is not timed; a
/// rank that gets past it earlier counts as one wrong element.
std::unique_ptr<Side> make_barrier(const ProcessGroup& group, SharedPage& page);

}  // namespace lockstep::bench
