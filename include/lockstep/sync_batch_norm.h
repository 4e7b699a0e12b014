#pragma once

#include <iosfwd>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <lockstep/export.h>
#include <lockstep/process_group.h>

namespace lockstep {

/// Batch normalisation by the mean and variance of all ranks' batches together, for inputs of shape [N, C, ...] on any
/// device. Batches may differ in size, and a rank's may have one value for each channel, or none. Parameters and
/// buffers are named as those of torch::nn::BatchNorm2d, so that checkpoints of either fit the other.
///
/// In training, forward is collective over the group, and backward once more if the input requires a gradient. In
/// evaluation each rank is on its own.
class LOCKSTEP_EXPORT SyncBatchNormImpl
    : public torch::nn::NormImplBase<1, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, ProcessGroup group);
  SyncBatchNormImpl(int64_t num_features, ProcessGroup group);

  torch::Tensor forward(const torch::Tensor& input);

  void pretty_print(std::ostream& stream) const override;

 private:
  void _check_input_dim(const torch::Tensor& input) override;

  ProcessGroup group_;
};
TORCH_MODULE(SyncBatchNorm);

/// From here on, every BatchNorm1d, 2d and 3d in the module normalises as SyncBatchNorm does, over the group, and
/// returns how many they are; each of them needs running statistics or a weight, by which their calls are recognised.
/// The modules stay what they are, so that members of a module's class need no change; copies by clone() are not
/// converted. Not collective. Another call may give another group.
///
/// LibTorch itself refuses a batch of one value for each channel before it can be joined with the others': use
/// SyncBatchNorm for layers that get one.
LOCKSTEP_EXPORT int64_t convert_sync_batch_norm(torch::nn::Module& module, const ProcessGroup& group);

}  // namespace lockstep
