#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/export.h>
#include <lockstep/process_group.h>

namespace lockstep {

/// A bucket of gradients that DistributedDataParallel reduces together, as a comm hook receives it.
struct GradientBucket {
  size_t index = 0;  // from 0, in the order in which buckets are reduced
  bool is_last = false;
  at::Tensor buffer;                   // 1-dimensional: all gradients, in memory of the group; padding is zero
  std::vector<at::Tensor> gradients;   // views of the buffer, with the shapes of the parameters; complex if they are
  std::vector<at::Tensor> parameters;  // the parameter of each gradient
  int64_t plan = 0;                    // changes when the buckets are rebuilt: state for an index is then stale
};

/// Finishes a reduction that a hook has started. When it returns, the bucket's buffer holds the result.
using FinishReduction = std::function<void()>;

/// Reduces one bucket, instead of averaging it over the group. A custom hook starts its communication and returns,
/// without waiting, a function that finishes it. The hook is called during backward as soon as a bucket is full, in the
/// same bucket order on all ranks. The returned functions are called at the end of backward, in the same order.
///
/// The hook determines the final gradients, including the division by the number of ranks. It may keep state for each
/// bucket index, together with GradientBucket::plan. Buckets are rebuilt after the first backward; state from an older
/// plan belongs to other gradients, even if the sizes are equal. The hook must not call the wrapper: the wrapper holds
/// a lock while the hook runs. The hooks below keep state: create one hook for each wrapper.
using CommHook = std::function<FinishReduction(const GradientBucket& bucket, const ProcessGroup& group)>;

/// Returns a hook that averages gradients, as DistributedDataParallel does without a hook.
LOCKSTEP_EXPORT CommHook all_reduce_hook();

/// Return a hook that averages gradients in float16 or bfloat16, which halves the bytes sent. CPU backends accumulate
/// in float32. NCCL accumulates in the 16-bit type but divides by the number of ranks before summing, so that the sum
/// does not overflow.
LOCKSTEP_EXPORT CommHook fp16_compress();
LOCKSTEP_EXPORT CommHook bf16_compress();

/// Returns a hook that sends nothing: every rank keeps its own gradients. For measuring the cost of communication.
LOCKSTEP_EXPORT CommHook no_op_hook();

struct PowerSgdOptions {
  /// Rank of the approximation, 1 or more. A gradient of n x m elements is sent as rank * (n + m) elements.
  int64_t rank = 1;
  /// Number of reductions that use the exact average before compression begins, because early gradients change fast.
  int64_t start_iteration = 1000;
  /// A gradient is compressed only if compression divides its number of elements by at least this factor.
  double min_compression_rate = 2;
  /// Adds the compression error of one step to the gradient of the next step.
  bool use_error_feedback = true;
  /// Starts each step from the last step's approximation instead of a random one.
  bool warm_start = true;
  /// Seed of the random approximations. Must be the same on every rank.
  uint64_t seed = 0;
};

/// Returns a PowerSGD hook (Vogels, Karimireddy, Jaggi: NeurIPS 2019), which averages low-rank approximations of the
/// gradients. Gradients with one dimension, non-contiguous gradients, and gradients that would not shrink enough are
/// sent uncompressed. Throws UsageError if rank or start_iteration is invalid.
LOCKSTEP_EXPORT CommHook power_sgd(const PowerSgdOptions& options = {});

}  // namespace lockstep
