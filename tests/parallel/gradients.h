#pragma once

#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "parallel/models.h"

/// What the gradients of an Mlp must be after a backward on several ranks.

inline torch::Tensor input_of(int rank) {
  return torch::randn({5, 6}, at::detail::createCPUGenerator(100 + rank));
}

/// The mean over all ranks of what each rank's gradient is by itself.
inline std::vector<torch::Tensor> mean_gradients(int size) {
  std::vector<torch::Tensor> sums;
  for (int rank = 0; rank < size; ++rank) {
    Mlp model;
    fill_parameters(*model, 1);
    model(input_of(rank)).square().sum().backward();
    auto parameters = model->parameters();
    sums.resize(parameters.size());
    for (size_t i = 0; i < parameters.size(); ++i)
      sums[i] = sums[i].defined() ? sums[i] + parameters[i].grad() : parameters[i].grad();
  }
  for (auto& sum : sums) sum = sum / size;
  return sums;
}

inline void expect_gradients(const torch::nn::Module& model, const std::vector<torch::Tensor>& expected,
                             double factor = 1) {
  auto parameters = model.parameters();
  ASSERT_EQ(parameters.size(), expected.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    ASSERT_TRUE(parameters[i].grad().defined()) << "parameter " << i;
    EXPECT_LE(relative_difference(parameters[i].grad(), expected[i] * factor), 1e-6) << "parameter " << i;
  }
}

inline Mlp filled_mlp() {
  Mlp model;
  fill_parameters(*model, 1);
  return model;
}

/// The identity; backward returns an undefined gradient, with which autograd goes on to every node behind it.
struct Stop : torch::autograd::Function<Stop> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, torch::Tensor x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    return {torch::Tensor()};
  }
};
