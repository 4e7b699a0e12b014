#pragma once

#include <ATen/core/Tensor.h>

#include <lockstep/process_group.h>

namespace lockstep {

/// A layer that normalises each channel (dimension 1) of its input. Any of the tensors may be undefined.
struct NormalizingLayer {
  at::Tensor weight, bias;
  at::Tensor running_mean, running_var;
  double momentum = 0;
  double eps = 0;
};

/// For each channel, of the batches of all ranks.
struct BatchMoments {
  at::Tensor mean;
  at::Tensor spread;  // as LibTorch's kernels want it: the variance on a CPU, 1 / sqrt(variance + eps) on a GPU
  at::Tensor counts;  // of values for a channel, by rank
};

struct Normalized {
  at::Tensor output;
  BatchMoments moments;  // backward needs them
};

/// UsageError unless the batches of all ranks have two values for each channel, as variances need.
void check_total(double total, const ProcessGroup& group);

/// Normalises the input by the batches of all ranks and updates the running statistics. Collective.
Normalized normalize_over_ranks(const at::Tensor& input, const NormalizingLayer& layer, const ProcessGroup& group);

struct NormalizationGradients {
  at::Tensor input, weight, bias;
};

/// Those of weight and bias are of this rank's outputs alone. Collective if the input's is wanted, which is undefined
/// otherwise.
NormalizationGradients gradients_over_ranks(const at::Tensor& output_gradient, const at::Tensor& input,
                                            const at::Tensor& weight, const BatchMoments& moments, double eps,
                                            bool wants_input, const ProcessGroup& group);

}  // namespace lockstep
