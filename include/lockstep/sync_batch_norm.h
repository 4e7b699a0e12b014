#pragma once

#include <iosfwd>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <lockstep/export.h>
#include <lockstep/process_group.h>

namespace lockstep {

/// Batch normalization with the mean and variance over the batches of all ranks, for inputs of shape [N, C, ...] on any
/// device. Batches may differ in size between ranks; a rank's batch may have one value for each channel, or none.
/// Parameters and buffers have the names of torch::nn::BatchNorm2d, so checkpoints are interchangeable.
///
/// In training mode, forward is collective over the group. Backward is collective too if the input requires a gradient.
/// In evaluation mode nothing is sent. Throws UsageError for an input of a different shape, if all ranks together have
/// fewer than 2 values for each channel, and for backward with create_graph.
class LOCKSTEP_EXPORT SyncBatchNormImpl
    : public torch::nn::NormImplBase<1, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, ProcessGroup group);
  SyncBatchNormImpl(int64_t num_features, ProcessGroup group);

  torch::Tensor forward(const torch::Tensor& input);

  /// The ranks over which the layer normalizes.
  const ProcessGroup& group() const { return group_; }

  void pretty_print(std::ostream& stream) const override;

 private:
  void _check_input_dim(const torch::Tensor& input) override;

  ProcessGroup group_;
};
TORCH_MODULE(SyncBatchNorm);

/// Makes every BatchNorm1d, BatchNorm2d and BatchNorm3d in the module normalize over the group, as SyncBatchNorm does,
/// and returns their number. Not collective. The modules keep their types, so classes that contain them need no change.
/// Another call can set a different group. Copies made by clone() are not converted. Convert a module before you wrap
/// it with DistributedDataParallel: on a CPU, layers that are converted later wait for gradient buckets in backward.
///
/// Each layer needs running statistics or a weight, which lockstep marks to recognize calls of the layer. If a layer
/// has neither, throws UsageError and converts nothing. The same for models whose BatchNorm layers are not modules of
/// LibTorch: ScriptModule, FunctionModule and CompiledModule with running statistics.
///
/// LibTorch refuses a batch with one value for each channel before lockstep can combine it with the other ranks'
/// batches. Use SyncBatchNorm for layers that get such batches.
LOCKSTEP_EXPORT int64_t convert_sync_batchnorm(torch::nn::Module& module, const ProcessGroup& group);

}  // namespace lockstep
