#pragma once

#include <ATen/core/Tensor.h>

#include <lockstep/process_group.h>

namespace lockstep {

/// Tensors and options of a layer that normalizes each channel (dimension 1) of its input. Any tensor may be undefined.
struct NormalizingLayer {
  at::Tensor weight, bias;
  at::Tensor running_mean, running_var;
  double momentum = 0;
  double eps = 0;
};

/// Moments of each channel over the batches of all ranks.
struct BatchMoments {
  at::Tensor mean;
  at::Tensor spread;  // the form that LibTorch's kernels expect: variance on a CPU, 1 / sqrt(variance + eps) on a GPU
  at::Tensor counts;  // number of values per channel, by rank
};

struct Normalized {
  at::Tensor output;
  BatchMoments moments;  // for backward
};

/// Throws UsageError if `total`, the number of values per channel over all ranks, is below 2: a variance needs two.
void check_total(double total, const ProcessGroup& group);

/// Normalizes the input with the moments of all ranks' batches and updates the running statistics. Collective. Throws
/// UsageError as check_total() does.
Normalized normalize_over_ranks(const at::Tensor& input, const NormalizingLayer& layer, const ProcessGroup& group);

struct NormalizationGradients {
  at::Tensor input, weight, bias;
};

/// Computes the gradients of input, weight and bias. The gradients of weight and bias cover this rank's outputs only.
/// The gradient of the input is undefined unless `wants_input` is set; collective if it is set.
NormalizationGradients gradients_over_ranks(const at::Tensor& output_gradient, const at::Tensor& input,
                                            const at::Tensor& weight, const BatchMoments& moments, double eps,
                                            bool wants_input, const ProcessGroup& group);

}  // namespace lockstep
