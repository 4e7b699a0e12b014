#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include <torch/nn/module.h>

#include <lockstep/export.h>
#include <lockstep/process_group.h>
#include <lockstep/value.h>

namespace lockstep {

/// How an update changes an average. Made by ema() and swa().
struct AveragingRule {
  /// Exponential: average = decay * average + (1 - decay) * weight. None: the equal mean of all updates.
  std::optional<double> decay{};
};

/// Exponential moving average. Throws UsageError unless `decay` is in [0, 1].
LOCKSTEP_EXPORT AveragingRule ema(double decay);
/// Stochastic weight averaging: the equal mean of the weights at all updates.
LOCKSTEP_EXPORT AveragingRule swa();

struct WeightAverageOptions {
  /// Averages buffers too. Otherwise each update copies them from the model. Integer buffers are always copied.
  bool use_buffers = false;
  /// Keeps the averages of float16 and bfloat16 weights in float32. In bfloat16 an average with decay 0.999 would never
  /// change: the steps are smaller than half the distance to the next number. PyTorch keeps the dtype of the weights.
  bool float32 = true;
};

namespace detail {

class AverageState;

/// The model has the averages while this object exists.
class LOCKSTEP_EXPORT AppliedAverage {
 public:
  explicit AppliedAverage(std::shared_ptr<AverageState> state);
  ~AppliedAverage();
  AppliedAverage(const AppliedAverage&) = delete;
  AppliedAverage& operator=(const AppliedAverage&) = delete;

 private:
  std::shared_ptr<AverageState> state_;
};

}  // namespace detail

/// An average of a model's weights over the steps of a training: torch.optim.swa_utils.AveragedModel. The averages are
/// kept beside the model, on its devices, and swapped in for an evaluation:
///
///     lockstep::WeightAverage average(*model, lockstep::ema(0.999));
///     ... optimizer.step(); average.update();
///     { auto guard = average.apply(); evaluate(model); }
///
/// Not collective. The ranks of a DistributedDataParallel have equal weights after each step, so the averages of
/// parameters are equal on all ranks without communication. Buffers are equal only if the model's are: see
/// update_batch_norm() and DistributedDataParallel::sync_buffers().
///
/// Construct it when the model is final and on its device. The model must outlive it. A parameter with several names is
/// averaged once. Not thread-safe. Not copyable.
///
/// All methods throw UsageError, which names the tensor, if a parameter or buffer was added, removed, replaced, resized
/// or moved to another device or dtype after construction.
class LOCKSTEP_EXPORT WeightAverage {
 public:
  WeightAverage(torch::nn::Module& model, AveragingRule rule, const WeightAverageOptions& options = {});
  ~WeightAverage();
  WeightAverage(const WeightAverage&) = delete;
  WeightAverage& operator=(const WeightAverage&) = delete;

  /// Adds the model's current weights to the average. Call it after optimizer.step(). The first update copies the
  /// weights. On a GPU it queues a few kernels for all weights and does not block. Later updates can be captured in a
  /// CUDA graph; the first one throws UsageError during capture. Throws UsageError while the averages are applied.
  void update();

  /// Copies the averages into the model until the returned guard is destroyed, also by an exception; then the model has
  /// its own weights again. Parameters and buffers keep their addresses, so DistributedDataParallel and captured steps
  /// stay valid. Needs memory for one more copy of the weights. A buffer that changes while the guard exists keeps its
  /// new value in the average, until the next update: this is how update_batch_norm() changes an average.
  ///
  /// Throws UsageError before the first update, during capture, and if the averages are applied already; also if a
  /// parameter is shared between ranks (ZeroRedundancyOptions::share_parameters), because the ranks would overwrite
  /// each other's weights. Copy the averages of shared parameters into a second model, by a second WeightAverage with
  /// load_state_dict() and copy_to_model().
  [[nodiscard]] detail::AppliedAverage apply();

  /// Copies the averages into the model for good. Throws UsageError as apply() does.
  void copy_to_model();

  /// Returns the number of updates. On a GPU it blocks.
  int64_t updates() const;

  /// The layout of Python's AveragedModel: "n_averaged", and "module.NAME" for each parameter and buffer. The tensors
  /// share memory with the averages.
  Value state_dict() const;
  /// Also accepts the state of an AveragedModel around Python's DistributedDataParallel. Throws UsageError, and changes
  /// nothing, if names or sizes differ; the message lists all of them. Throws UsageError while the averages are
  /// applied.
  void load_state_dict(const Value& dict);

 private:
  std::shared_ptr<detail::AverageState> state_;
};

/// Computes new running statistics for all batch normalization layers of a model with its current weights, as Python's
/// update_bn does: BatchNorm1d, BatchNorm2d, BatchNorm3d and SyncBatchNorm layers that track statistics.
/// `forward_batches` calls the model's forward for each batch. Meanwhile gradients are disabled, the model is in
/// training mode, and each batch has the same weight. Afterwards every module has its mode and momentum again, also
/// after an exception.
///
/// With a group, the result is the same as if one process had forwarded the batches of all ranks, and
/// num_batches_tracked is their number. Ranks may have different numbers of batches, unless the layers themselves
/// communicate. Collective then: one all-reduce, after `forward_batches`. Call the module itself, not a
/// DistributedDataParallel: the wrapper's forward would overwrite the statistics with rank 0's.
///
/// A layer that got no batch keeps its statistics. If no layer got a batch, on any rank, throws UsageError. After an
/// exception all layers have their old statistics. Without such layers, does not call `forward_batches`. On a GPU it
/// blocks.
LOCKSTEP_EXPORT void update_batch_norm(torch::nn::Module& model, const std::function<void()>& forward_batches);
LOCKSTEP_EXPORT void update_batch_norm(torch::nn::Module& model, const ProcessGroup& group,
                                       const std::function<void()>& forward_batches, const CallOptions& options = {});

}  // namespace lockstep
