#pragma once

#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <lockstep/fused_optimizers.h>

namespace lockstep::detail {

/// How to make and capture an optimizer of the user's class.
struct InnerOptimizer {
  std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<torch::optim::OptimizerParamGroup> groups)> make;
  void (*before_replay)(torch::optim::Optimizer&);
  bool is_fused;  ///< FusedAdamW, FusedAdam or FusedSGD
};

template <class Optimizer>
inline constexpr bool is_fused = std::is_base_of_v<FusedAdamW, Optimizer> || std::is_base_of_v<FusedAdam, Optimizer> ||
                                 std::is_base_of_v<FusedSGD, Optimizer>;

template <class Optimizer, class... Known>
inline constexpr bool is_one_of = (std::is_same_v<Optimizer, Known> || ...);

template <class Optimizer>
inline constexpr bool updates_elements =
    is_one_of<Optimizer, torch::optim::SGD, torch::optim::Adam, torch::optim::AdamW, torch::optim::Adagrad,
              torch::optim::RMSprop, FusedSGD, FusedAdam, FusedAdamW, WithMasterWeights<FusedSGD>,
              WithMasterWeights<FusedAdam>, WithMasterWeights<FusedAdamW>>;

}  // namespace lockstep::detail
