#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <lockstep/export.h>

namespace lockstep {

/// How parameters are divided between ranks.
enum class ShardBy {
  /// To the element: shares are equal, whatever the sizes of the parameters. For optimizers that update each element
  /// by its own gradient and state, as SGD, Adam and their kin do.
  kElements,
  /// Parameters stay whole. For optimizers that look at a parameter as a whole, as LARS and LAMB do.
  kParameters,
};

/// Elements of one parameter that follow each other in memory.
struct ShardPiece {
  size_t parameter = 0;
  int64_t begin = 0;
  int64_t size = 0;

  friend bool operator==(const ShardPiece&, const ShardPiece&) = default;
};

/// Where parameters of one dtype lie in one piece of memory, of which each rank has one range. In elements.
struct LOCKSTEP_EXPORT ShardPlan {
  std::vector<int64_t> offsets;  // of each parameter
  std::vector<int64_t> begins;   // of each rank's range, and where the last one ends

  int64_t elements() const { return begins.back(); }  // that the memory holds, gaps included
  int64_t size_of(int rank) const { return begins[rank + 1] - begins[rank]; }
  bool is_even() const;  // all ranks' ranges are of one size

  friend bool operator==(const ShardPlan&, const ShardPlan&) = default;
};

/// Divides parameters of these sizes. Each begins at a multiple of `alignment`. Pure: equal arguments give equal plans.
LOCKSTEP_EXPORT ShardPlan plan_shards(const std::vector<int64_t>& sizes, int ranks, ShardBy by, int64_t alignment);

/// What a rank has of the parameters, in their order.
LOCKSTEP_EXPORT std::vector<ShardPiece> pieces_of(const ShardPlan& plan, const std::vector<int64_t>& sizes, int rank);

}  // namespace lockstep
