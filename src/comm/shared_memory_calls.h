#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/process_group.h>

namespace lockstep::detail {

// Calls of groups whose ranks access one another's memory. In other groups they throw UsageError.

/// Whether all ranks of the group can access one another's CPU memory.
bool shares_memory(const ProcessGroup& group);

/// "backend gloo, because shm cannot be used (rank 1: ... raise `ulimit -v`)", for errors about such a group.
std::string describe_backend(const ProcessGroup& group);

/// Returns a tensor, filled with zeros, whose memory is the same on all ranks. The memory lives until every rank has
/// released the tensor or has ended, even if the group is destroyed. Collective.
at::Tensor allocate_shared(const ProcessGroup& group, int64_t elements, at::ScalarType dtype,
                           const CallOptions& options);

/// Arguments of reduce_ranges.
struct RangeReduction {
  at::Tensor tensor;  // flat, from ProcessGroup::allocate
  ReduceOp op = ReduceOp::kSum;
  std::vector<Backend::Range> ranges{};  // the ranges that this rank reduces
  Backend::Consume consume{};            // must not hold a handle of the group
  /// Must be the same on all ranks: otherwise the call is a MismatchError, which quotes it.
  std::string detail{};
};

/// Reduces ranges of a tensor and passes the results to a function; see Backend::reduce_ranges. Collective.
void reduce_ranges(const ProcessGroup& group, RangeReduction reduction, const CallOptions& options);
[[nodiscard]] Work reduce_ranges_async(const ProcessGroup& group, RangeReduction reduction, const CallOptions& options);

}  // namespace lockstep::detail
