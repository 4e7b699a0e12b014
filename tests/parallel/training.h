#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/torch.h>

/// Inputs and optimizers of the tests that train. ddp_oracle.py has the same.

constexpr int kBatch = 5;  // of one rank

inline torch::Tensor inputs_of(int step, int rank, at::IntArrayRef sample, at::ScalarType dtype) {
  auto generator = at::detail::createCPUGenerator(1000 + 10 * step + rank);
  std::vector<int64_t> sizes{kBatch};
  sizes.insert(sizes.end(), sample.begin(), sample.end());
  return torch::randn(sizes, generator, torch::kDouble).to(dtype);
}

inline torch::Tensor targets_of(int step, int rank) {
  auto generator = at::detail::createCPUGenerator(5000 + 10 * step + rank);
  return torch::randint(0, 4, {kBatch}, generator, torch::kLong);
}

inline std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name,
                                                               std::vector<torch::Tensor> parameters) {
  if (name == "adam") return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(0.01));
  const double momentum = name == "momentum" ? 0.9 : 0;
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.02).momentum(momentum));
}
