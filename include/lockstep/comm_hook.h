#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/export.h>
#include <lockstep/process_group.h>

namespace lockstep {

/// Gradients that DistributedDataParallel reduces together, as a comm hook sees them.
struct GradientBucket {
  size_t index = 0;  // from 0, in the order in which buckets leave
  bool is_last = false;
  at::Tensor buffer;                   // one dimension: all gradients, in memory of the group; the gaps hold zeros
  std::vector<at::Tensor> gradients;   // parts of the buffer, with the shapes of the parameters
  std::vector<at::Tensor> parameters;  // whose gradients they are
};

/// What ends a reduction that a hook has started: when it returns, the bucket's buffer holds the result.
using FinishReduction = std::function<void()>;

/// Reduces a bucket in place of the average over the group. Called during backward as soon as the bucket is full, with
/// the buckets in the same order on all ranks; it starts what it needs and returns, so that backward can go on. What it
/// returns is called at the end of backward, bucket by bucket in the same order.
///
/// The hook decides what becomes of the gradients, the division by the number of ranks included. It may keep state by
/// the bucket's index, but the buckets are made anew once, after the first backward: compare sizes. It must not call
/// the wrapper, which waits for it. Those made by the functions below keep state: make one for each wrapper.
using CommHook = std::function<FinishReduction(const GradientBucket& bucket, const ProcessGroup& group)>;

/// The average, as without a hook.
LOCKSTEP_EXPORT CommHook all_reduce_hook();

/// The average of gradients that travel in 16 bits: half the bytes. Sums are accumulated in float32 on every backend,
/// so that they do not overflow.
LOCKSTEP_EXPORT CommHook fp16_compress();
LOCKSTEP_EXPORT CommHook bf16_compress();

/// Nothing is sent; every rank keeps its own gradients. For measuring what communication costs.
LOCKSTEP_EXPORT CommHook no_op_hook();

struct PowerSgdOptions {
  /// Of the approximation: a gradient of n x m elements travels as rank * (n + m).
  int64_t rank = 1;
  /// Reductions of which the exact average is taken before compression begins: early gradients change fast.
  int64_t start_iteration = 1000;
  /// A gradient is compressed when that divides its elements at least by this.
  double min_compression_rate = 2;
  /// What compression lost in one step is added to the gradient of the next.
  bool use_error_feedback = true;
  /// Each step begins with the last step's approximation and not with a random one.
  bool warm_start = true;
  uint64_t seed = 0;
};

/// PowerSGD (Vogels, Karimireddy, Jaggi: NeurIPS 2019): the average of approximations of low rank. Gradients of one
/// dimension, and those that would not shrink, travel whole.
LOCKSTEP_EXPORT CommHook power_sgd(const PowerSgdOptions& options = {});

}  // namespace lockstep
