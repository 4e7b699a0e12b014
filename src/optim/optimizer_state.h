#pragma once

#include <memory>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>

#include <torch/optim/optimizer.h>

#include <lockstep/optimizer_state.h>

namespace lockstep::detail {

/// Returns the key of a parameter in an optimizer's state: the tensor's address, as text before LibTorch 2.1.
template <class Key>
Key state_key(const at::Tensor& parameter) {
  if constexpr (std::is_same_v<Key, std::string>) {
    std::ostringstream address;
    address << parameter.unsafeGetTensorImpl();
    return address.str();
  } else {
    return parameter.unsafeGetTensorImpl();
  }
}

template <class Optimizer>
using StateKey = typename std::decay_t<decltype(std::declval<Optimizer&>().state())>::value_type::first_type;

/// Returns a parameter's state; null before its first step.
template <class State, class Optimizer>
State* find_state(Optimizer& optimizer, const at::Tensor& parameter) {
  const auto found = optimizer.state().find(state_key<StateKey<Optimizer>>(parameter));
  return found == optimizer.state().end() ? nullptr : static_cast<State*>(found->second.get());
}

template <class State, class Optimizer>
State* add_state(Optimizer& optimizer, const at::Tensor& parameter, std::unique_ptr<State> state) {
  auto& place = optimizer.state()[state_key<StateKey<Optimizer>>(parameter)];
  place = std::move(state);
  return static_cast<State*>(place.get());
}

/// Returns the bytes of the tensors in the optimizer's state. Copies the state only of optimizers that LibTorch does
/// not have.
int64_t state_bytes(const torch::optim::Optimizer& optimizer);

/// As lockstep::state_dict(), but for the optimizers of LibTorch and lockstep the tensors are those of the optimizer,
/// not copies.
OptimizerState view_state(const torch::optim::Optimizer& optimizer);

/// Throws UsageError unless the state fits the groups and parameters of this optimizer.
void check_fits(const torch::optim::Optimizer& optimizer, const OptimizerState& state);

}  // namespace lockstep::detail
