#include "bench/ranks/checkpoint_state.h"

#include <ATen/ATen.h>
#include <torch/types.h>

#include <lockstep/module_state.h>
#include <lockstep/optimizer_state.h>

namespace lockstep::bench {
namespace {

constexpr int64_t kSteps = 1000;

/// Exact in float32 if `index` is below 4096.
at::Tensor make_saved_tensor(const std::vector<int64_t>& sizes, int64_t index) {
  auto tensor = torch::empty(sizes);
  auto flat = tensor.view(-1);
  flat.copy_(torch::arange(flat.numel(), torch::kInt).remainder_(4093));
  flat.mul_(1.0 / 4096).add_(static_cast<double>(index));
  return tensor;
}

std::shared_ptr<torch::nn::Module> make_saved_model(const CheckpointPlan& plan) {
  auto model = std::make_shared<torch::nn::Module>();
  int64_t index = 0;
  for (const auto& parameter : plan.parameters)
    model->register_parameter(parameter.name, make_saved_tensor(parameter.sizes, index++));
  return model;
}

bool is_equal(const Value* loaded, const at::Tensor& expected) {
  return loaded && loaded->is(Value::Kind::kTensor) && loaded->tensor().sizes() == expected.sizes() &&
         loaded->tensor().scalar_type() == expected.scalar_type() && at::equal(loaded->tensor(), expected);
}

bool has_steps(const Value* loaded) {
  return loaded && (loaded->is(Value::Kind::kTensor) ? loaded->tensor().item<double>() : loaded->as_double()) == kSteps;
}

}  // namespace

CheckpointState::CheckpointState(const CheckpointPlan& plan)
    : model_(make_saved_model(plan)), optimizer_(std::make_unique<torch::optim::AdamW>(model_->parameters())) {
  const auto count = static_cast<int64_t>(plan.parameters.size());
  auto state = state_dict(*optimizer_);
  for (int64_t i = 0; i < count; ++i) {
    const auto& sizes = plan.parameters[static_cast<size_t>(i)].sizes;
    state["state"].set(i, Value::dict({{"step", kSteps},
                                       {"exp_avg", make_saved_tensor(sizes, count + i)},
                                       {"exp_avg_sq", make_saved_tensor(sizes, 2 * count + i)}}));
  }
  load_state_dict(*optimizer_, state);
}

Value CheckpointState::value() const {
  return Value::dict({{"model", state_dict(*model_)}, {"optimizer", state_dict(*optimizer_)}});
}

TrainingState CheckpointState::training_state() {
  return TrainingState{}.add("model", model_).add("optimizer", *optimizer_);
}

std::vector<at::Tensor> CheckpointState::tensors() const {
  const auto state = value();
  std::vector<at::Tensor> tensors;
  for (const auto& [name, parameter] : state.at("model").items()) tensors.push_back(parameter.tensor());
  for (const auto& [index, values] : state.at("optimizer").at("state").items())
    for (const char* name : {"exp_avg", "exp_avg_sq"}) tensors.push_back(values.at(name).tensor());
  return tensors;
}

int64_t CheckpointState::count_wrong(const Value& loaded) const {
  const auto expected = value();
  const auto& moments = expected.at("optimizer").at("state");
  const auto& loaded_model = loaded.at("model");
  const auto& loaded_moments = loaded.at("optimizer").at("state");
  int64_t wrong = 0, index = 0;
  for (const auto& [name, parameter] : expected.at("model").items()) {
    const auto* values = loaded_moments.find(index);
    bool is_right = values && is_equal(loaded_model.find(name), parameter.tensor()) && has_steps(values->find("step"));
    for (const char* moment : {"exp_avg", "exp_avg_sq"})
      is_right = is_right && is_equal(values->find(moment), moments.at(index).at(moment).tensor());
    wrong += is_right ? 0 : 1;
    ++index;
  }
  return wrong;
}

}  // namespace lockstep::bench
