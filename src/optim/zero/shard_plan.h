#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <lockstep/zero_redundancy_optimizer.h>

namespace lockstep::detail {

/// A contiguous range of elements of one parameter.
struct ShardPiece {
  size_t parameter = 0;
  int64_t begin = 0;
  int64_t size = 0;

  friend bool operator==(const ShardPiece&, const ShardPiece&) = default;
};

/// The layout of parameters of one dtype in one block of memory, of which each rank owns one range. In elements.
struct ShardPlan {
  std::vector<int64_t> offsets;  // of each parameter
  std::vector<int64_t> begins;   // begin of each rank's range; the last element is the end of the last range

  int64_t elements() const { return begins.back(); }  // that the memory holds, gaps included
  int64_t size_of(int rank) const { return begins[rank + 1] - begins[rank]; }
  bool is_even() const;  // all ranks' ranges are of one size

  friend bool operator==(const ShardPlan&, const ShardPlan&) = default;
};

/// Where a parameter lies before it is moved, in elements.
struct ParameterRange {
  int64_t storage = 0;  // equal for parameters that share a storage
  int64_t offset = 0;
  int64_t size = 0;
};

/// Divides parameters. Pure: equal arguments give equal plans. Each parameter begins at a multiple of `alignment`,
/// except that with ShardBy::kElements parameters of one storage keep their distances: cuDNN copies the weights of an
/// RNN in each step unless they lie in one block in cuDNN's order.
ShardPlan plan_shards(const std::vector<ParameterRange>& parameters, int ranks, ShardBy by, int64_t alignment);

/// The pieces of parameters in the range of a rank, in the order of parameters.
std::vector<ShardPiece> pieces_of(const ShardPlan& plan, const std::vector<int64_t>& sizes, int rank);

}  // namespace lockstep::detail
