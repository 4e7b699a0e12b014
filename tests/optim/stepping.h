#pragma once

#include <optional>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "parallel/models.h"

/// Parameters and gradients that the tests of optimizers step.

inline std::vector<torch::Device> devices_under_test() {
  std::vector<torch::Device> devices{torch::kCPU};
  if (torch::cuda::is_available()) devices.emplace_back(torch::kCUDA, 0);
  return devices;
}

inline torch::Tensor numbers(at::IntArrayRef sizes, uint64_t seed, at::ScalarType dtype) {
  return torch::randn(sizes, at::detail::createCPUGenerator(seed), torch::kDouble).to(dtype);
}

/// Small and large ones, one of a single element, one that lies in memory in another order than it is indexed.
inline std::vector<torch::Tensor> make_parameters(at::ScalarType dtype, torch::Device device) {
  std::vector<torch::Tensor> parameters;
  uint64_t seed = 1;
  for (const auto& sizes : {std::vector<int64_t>{5, 3}, {7}, {}, {2, 3, 4, 4}, {40000}, {1, 9}}) {
    auto values = numbers(sizes, seed++, dtype);
    if (sizes.size() == 4) values = values.contiguous(at::MemoryFormat::ChannelsLast);
    parameters.push_back(values.to(device).requires_grad_());
  }
  return parameters;
}

/// Gradients of a step: some parameters have none, and one's lies otherwise in memory than the parameter.
inline void set_gradients(const std::vector<torch::Tensor>& parameters, int step) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& parameter = parameters[i];
    const bool has_one = i != 1 || step % 3 != 0;
    parameter.mutable_grad() =
        has_one ? numbers(parameter.sizes(), 100 * step + i, parameter.scalar_type()).to(parameter.device())
                : torch::Tensor();
  }
}

inline void expect_equal(const std::vector<torch::Tensor>& actual, const std::vector<torch::Tensor>& expected,
                         double tolerance, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t i = 0; i < actual.size(); ++i)
    EXPECT_LE(relative_difference(actual[i], expected[i]), tolerance) << what << ", parameter " << i;
}

/// Of the largest distance between numbers of that dtype that are equal but for the order of operations.
inline double tolerance_of(at::ScalarType dtype) {
  return dtype == torch::kDouble ? 1e-12 : 1e-6;
}
