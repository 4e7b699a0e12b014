#pragma once

#include <tuple>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/sync_batch_norm.h>

#include "parallel/models.h"

/// Layers that normalize batches, and what they make of them.

namespace lockstep {

using torch::nn::BatchNormOptions;

/// What a layer makes of a batch, and all that its backward gives.
struct Pass {
  torch::Tensor output, input_gradient, weight_gradient, bias_gradient, running_mean, running_var;
};

template <class Layer>
Pass pass(Layer layer, torch::Tensor input, const torch::Tensor& output_gradient) {
  input = input.clone().requires_grad_();
  auto output = layer->forward(input);
  output.backward(output_gradient);
  auto gradient_of = [](const torch::Tensor& tensor) { return tensor.defined() ? tensor.grad() : torch::Tensor(); };
  return {output.detach(),          input.grad(),        gradient_of(layer->weight),
          gradient_of(layer->bias), layer->running_mean, layer->running_var};
}

inline torch::Tensor random(at::IntArrayRef sizes, uint64_t seed, at::ScalarType dtype = torch::kDouble) {
  auto values = torch::randn(sizes, at::detail::createCPUGenerator(seed), torch::kDouble);
  return (values * 1.7 + 4).to(dtype);
}

/// Rows of a batch that this rank has.
struct Share {
  int64_t begin;
  int64_t size;
};

inline torch::Tensor part(const torch::Tensor& all, const Share& share) {
  return all.narrow(0, share.begin, share.size);
}

/// Batches of the given sizes.
inline Share share_of(const std::vector<int64_t>& sizes, int rank) {
  int64_t begin = 0;
  for (int other = 0; other < rank; ++other) begin += sizes[other];
  return {begin, sizes[rank]};
}

inline void expect_near(const torch::Tensor& actual, const torch::Tensor& expected, double tolerance,
                        const char* what) {
  ASSERT_EQ(actual.defined(), expected.defined()) << what;
  if (!actual.defined() || actual.numel() == 0) return;
  EXPECT_EQ(actual.scalar_type(), expected.scalar_type()) << what;
  EXPECT_LE(relative_difference(actual, expected), tolerance) << what;
}

template <class Layer>
Layer filled(const BatchNormOptions& options, at::ScalarType dtype = torch::kDouble) {
  Layer layer(options);
  if (layer->weight.defined()) fill_parameters(*layer, 7);
  layer->to(dtype);
  return layer;
}

template <class Layer>
Layer converted(const BatchNormOptions& options, const ProcessGroup& world, at::ScalarType dtype = torch::kDouble) {
  auto layer = filled<Layer>(options, dtype);
  EXPECT_EQ(convert_sync_batchnorm(*layer, world), 1);
  return layer;
}

}  // namespace lockstep
