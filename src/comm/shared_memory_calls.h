#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/process_group.h>

namespace lockstep::detail {

// Calls of groups whose ranks access one another's memory. In other groups they throw UsageError.

/// Whether all ranks of the group can access one another's CPU memory.
bool shares_memory(const ProcessGroup& group);

/// Returns a tensor, filled with zeros, whose memory is the same on all ranks. The memory lives until every rank has
/// released the tensor or has ended, even if the group is destroyed. Collective.
at::Tensor allocate_shared(const ProcessGroup& group, int64_t elements, at::ScalarType dtype,
                           const CallOptions& options);

/// Reduces ranges of `tensor`, a flat tensor from ProcessGroup::allocate, and passes the results to `consume`; see
/// Backend::reduce_ranges. Each rank names its own ranges. `consume` must not hold a handle of the group. `detail` must
/// be the same on all ranks: otherwise the call is a MismatchError, which quotes it. Collective.
[[nodiscard]] Work reduce_ranges_async(const ProcessGroup& group, const at::Tensor& tensor, ReduceOp op,
                                       std::vector<Backend::Range> ranges, Backend::Consume consume,
                                       const CallOptions& options, std::string detail = {});

}  // namespace lockstep::detail
