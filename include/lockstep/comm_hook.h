#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/export.h>
#include <lockstep/process_group.h>

namespace lockstep {

class Value;

/// A bucket of gradients that DistributedDataParallel reduces together, as a comm hook receives it.
struct GradientBucket {
  size_t index = 0;  ///< number of the bucket, from 0, in the order in which buckets are reduced
  bool is_last = false;
  at::Tensor buffer;                   ///< 1-dimensional: all gradients, in memory of the group; padding is zero
  std::vector<at::Tensor> gradients;   ///< views of the buffer, with the shapes of the parameters; complex if they are
  std::vector<at::Tensor> parameters;  ///< the parameter of each gradient
  std::vector<std::string> names;      ///< names of the parameters: the same in every plan, for state that outlives one
  int64_t plan = 0;                    ///< changes when the buckets are rebuilt: state of an index is then stale
};

/// Finishes a reduction that a hook has started. When it returns, the bucket's buffer holds the result.
using FinishReduction = std::function<void()>;

/// Reduces one bucket, instead of averaging it over the group. A custom hook starts its communication and returns,
/// without waiting, a function that finishes it. The hook is called during backward as soon as a bucket is full, in the
/// same bucket order on all ranks. The returned functions are called at the end of backward, in the same order.
///
/// The hook determines the final gradients, including the division by the number of ranks. It may keep state for each
/// bucket index, together with GradientBucket::plan, or for each name of a parameter. Buckets are rebuilt after the
/// first backward; state from an older plan belongs to other gradients, even if the sizes are equal. The hook must not
/// call the wrapper: the wrapper holds a lock while the hook runs. The hooks below keep state: create one hook for each
/// wrapper.
using CommHook = std::function<FinishReduction(const GradientBucket& bucket, const ProcessGroup& group)>;

/// Returns a hook that averages gradients, as DistributedDataParallel does without a hook.
LOCKSTEP_EXPORT CommHook all_reduce_hook();

/// Return a hook that averages gradients in float16 or bfloat16, which halves the bytes sent. CPU backends accumulate
/// in float32. NCCL accumulates in the 16-bit type but divides by the number of ranks before summing, so that the sum
/// does not overflow. A gradient that exceeds float16 becomes infinite on all ranks in that step; the hooks keep no
/// state.
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
///
/// If a gradient of any rank is infinite or NaN, or the approximation overflows, all gradients of that backward become
/// NaN on all ranks, so that GradScaler skips the step on all of them. The overflow leaves the state of the hook as it
/// was, except that the backward counts as a reduction. The first `start_iteration` reductions are plain averages.
LOCKSTEP_EXPORT CommHook power_sgd(const PowerSgdOptions& options = {});

namespace detail {
class PowerSgd;
}

/// A PowerSGD hook whose state can be saved, as with PowerSGDState in Python:
///
///     lockstep::PowerSgdState power_sgd({.rank = 2});
///     ddp.register_comm_hook(power_sgd.hook());
///     auto state = lockstep::TrainingState{}.add("model", ddp.module()).add("optimizer", optimizer)
///                      .add("power_sgd", power_sgd);
///
/// Resumed with the same number of ranks on CPUs, a run has the same bits as one that was not interrupted. With another
/// number, each rank begins with the mean of the errors of all ranks, so that the sum of later gradients is still
/// right.
///
/// The state is the number of reductions and, by the name of the parameter, the error and the factor of each compressed
/// gradient. Errors differ between ranks and are as large as the gradients: a CheckpointDirectory gathers those of all
/// ranks on rank 0, and every rank loads all of them. Copies share the state. Not thread-safe; not during backward.
class LOCKSTEP_EXPORT PowerSgdState {
 public:
  /// Throws UsageError as power_sgd() does.
  explicit PowerSgdState(const PowerSgdOptions& options = {});

  /// Returns the hook. Register it with one wrapper only.
  CommHook hook() const;

  /// The state of this rank, with copies of its tensors on the CPU. Not collective.
  Value state_dict() const;
  /// Replaces the state by one that this rank has saved. Throws UsageError if it was saved with another `rank`. If it
  /// is of another model, the next backward throws UsageError, which names the parameter, on all ranks.
  void load_state_dict(const Value& state);
  /// Replaces the state by that of this rank among `states`, which are those of all ranks that saved, by rank. For
  /// TrainingState.
  void load_rank_states(const std::vector<Value>& states, const ProcessGroup& group);

 private:
  std::shared_ptr<detail::PowerSgd> impl_;  // not null
};

}  // namespace lockstep
