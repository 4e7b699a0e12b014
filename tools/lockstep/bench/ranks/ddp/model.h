#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/nn/modules/container/sequential.h>

namespace lockstep::bench {

/// The model of this name, one of model_names(), with the same weights on every rank. python_rank.py has the same.
torch::nn::Sequential make_model(const std::string& name);

/// The shape of one sample.
std::vector<int64_t> input_shape(const std::string& model);

/// What the last layer tells apart.
inline constexpr int64_t kClasses = 10;

}  // namespace lockstep::bench
