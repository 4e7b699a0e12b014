#include "optim/zero/element_update.h"

#include <atomic>
#include <cstring>

#include <ATen/ATen.h>

#include <lockstep/fused_optimizers.h>

#include "base/text.h"
#include "optim/master_weights.h"
#include "optim/optimizer_state.h"

namespace lockstep::detail {
namespace {

using torch::optim::OptimizerOptions;

/// Returns `home` with the values of `state`, or with zeros if the state is undefined.
at::Tensor moved(const at::Tensor& state, const at::Tensor& home) {
  if (!state.defined())
    home.zero_();
  else if (state.data_ptr() != home.data_ptr())
    home.copy_(state);
  return home;
}

/// Counts the step of an Adam optimizer and moves its state.
template <class State, class Options>
AdamUpdate begin_adam(torch::optim::Optimizer& optimizer, const OptimizerOptions& any, const at::Tensor& parameter,
                      const std::vector<at::Tensor>& homes, bool is_decoupled) {
  const auto& options = static_cast<const Options&>(any);
  auto* state = find_state<State>(optimizer, parameter);
  if (!state) state = add_state(optimizer, parameter, std::make_unique<State>());
  state->exp_avg(moved(state->exp_avg(), homes[0]));
  state->exp_avg_sq(moved(state->exp_avg_sq(), homes[1]));
  if (options.amsgrad()) state->max_exp_avg_sq(moved(state->max_exp_avg_sq(), homes[2]));
  state->step(state->step() + 1);
  const auto [beta1, beta2] = options.betas();
  return {options.lr(), beta1, beta2, options.eps(), options.weight_decay(), is_decoupled, state->step()};
}

SgdUpdate begin_sgd(torch::optim::Optimizer& optimizer, const OptimizerOptions& any, const at::Tensor& parameter,
                    const std::vector<at::Tensor>& homes) {
  using State = torch::optim::SGDParamState;
  const auto& options = static_cast<const torch::optim::SGDOptions&>(any);
  bool is_first = false;
  if (options.momentum() != 0) {
    auto* state = find_state<State>(optimizer, parameter);
    if (!state) state = add_state(optimizer, parameter, std::make_unique<State>());
    is_first = !state->momentum_buffer().defined();
    state->momentum_buffer(moved(state->momentum_buffer(), homes[0]));
  }
  return {options.lr(), options.momentum(), options.dampening(), options.weight_decay(), options.nesterov(), is_first};
}

/// Copies `count` elements, in memory order, from `begin` on. Both tensors are dense and have the same dtype.
void copy_elements(const at::Tensor& from, const at::Tensor& to, int64_t begin, int64_t count) {
  const auto width = static_cast<int64_t>(from.element_size());
  std::memcpy(static_cast<char*>(to.data_ptr()) + begin * width,
              static_cast<const char*>(from.data_ptr()) + begin * width, static_cast<size_t>(count * width));
}

}  // namespace

std::string ElementUpdate::refusal(const torch::optim::Optimizer& optimizer) {
  const bool is_fused = dynamic_cast<const FusedAdamW*>(&optimizer) || dynamic_cast<const FusedAdam*>(&optimizer) ||
                        dynamic_cast<const FusedSGD*>(&optimizer);
  if (!is_fused) return "the optimizer is not FusedAdamW, FusedAdam or FusedSGD";
  if (masters_of(optimizer)) return "the optimizer keeps master weights";
  return {};
}

size_t ElementUpdate::states(const OptimizerOptions& options) {
  if (const auto* adamw = dynamic_cast<const torch::optim::AdamWOptions*>(&options)) return adamw->amsgrad() ? 3 : 2;
  if (const auto* adam = dynamic_cast<const torch::optim::AdamOptions*>(&options)) return adam->amsgrad() ? 3 : 2;
  return static_cast<const torch::optim::SGDOptions&>(options).momentum() != 0 ? 1 : 0;
}

ElementUpdate::ElementUpdate(torch::optim::Optimizer& optimizer, const OptimizerOptions& options,
                             const at::Tensor& parameter, const Memory& memory, int32_t step)
    : saved_(memory.saved),
      step_(step),
      optimizer_(&optimizer),
      has_created_state_(!find_state<torch::optim::OptimizerParamState>(optimizer, parameter)) {
  if (dynamic_cast<const torch::optim::AdamWOptions*>(&options))
    update_ = begin_adam<torch::optim::AdamWParamState, torch::optim::AdamWOptions>(optimizer, options, parameter,
                                                                                    memory.state, true);
  else if (dynamic_cast<const torch::optim::AdamOptions*>(&options))
    update_ = begin_adam<torch::optim::AdamParamState, torch::optim::AdamOptions>(optimizer, options, parameter,
                                                                                  memory.state, false);
  else
    update_ = begin_sgd(optimizer, options, parameter, memory.state);
  tensors_[0] = parameter;
  std::copy_n(memory.state.begin(), states(options), tensors_.begin() + 1);
  std::copy(memory.before.begin(), memory.before.end(), before_.begin());
}

void ElementUpdate::apply(int64_t begin, int64_t count, const void* gradient) const {
  for (size_t i = 0; i < kMaxTensors; ++i)
    if (tensors_[i].defined() && before_[i].defined()) copy_elements(tensors_[i], before_[i], begin, count);
  for (int64_t part = begin; saved_ && part < begin + count; part += kSavedElements)
    std::atomic_ref(saved_[part / kSavedElements]).store(step_, std::memory_order_release);
  const auto range = range_of(tensors_[0], tensors_[1], tensors_[2], tensors_[3], begin, count);
  if (const auto* adam = std::get_if<AdamUpdate>(&update_))
    update_adam(range, gradient, *adam);
  else
    update_sgd(range, gradient, std::get<SgdUpdate>(update_));
}

void ElementUpdate::undo_step_count() const {
  const auto& parameter = tensors_[0];
  if (has_created_state_) {
    optimizer_->state().erase(state_key<StateKey<torch::optim::Optimizer>>(parameter));
  } else if (auto* adamw = dynamic_cast<FusedAdamW*>(optimizer_)) {
    auto* state = find_state<torch::optim::AdamWParamState>(*adamw, parameter);
    state->step(state->step() - 1);
  } else if (auto* adam = dynamic_cast<FusedAdam*>(optimizer_)) {
    auto* state = find_state<torch::optim::AdamParamState>(*adam, parameter);
    state->step(state->step() - 1);
  }
}

}  // namespace lockstep::detail
