#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

#include <lockstep/value.h>

namespace lockstep::detail {

/// The result of lockstep::state_dict(), with LibTorch's values.
struct OptimizerState {
  using Values = std::map<std::string, c10::IValue>;

  struct Group {
    Values options{};
    std::vector<int64_t> parameters{};
    std::vector<std::string> names{};  // of the parameters; empty if unknown
  };

  std::map<int64_t, Values> parameters{};  // only parameters that have been updated at least once
  std::vector<Group> groups{};
};

/// The tensors are shared.
Value to_value(const OptimizerState& state);
/// Throws UsageError if the value has another layout.
OptimizerState to_optimizer_state(const Value& value);

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

/// For the optimizers of LibTorch and lockstep, the tensors are the optimizer's tensors; for other classes, copies.
OptimizerState get_optimizer_state(const torch::optim::Optimizer& optimizer);
/// lockstep::load_state_dict() with a state that is converted already.
void set_optimizer_state(torch::optim::Optimizer& optimizer, const OptimizerState& state);

/// Throws UsageError unless the state fits the groups and parameters of this optimizer.
void check_fits(const torch::optim::Optimizer& optimizer, const OptimizerState& state);

}  // namespace lockstep::detail
