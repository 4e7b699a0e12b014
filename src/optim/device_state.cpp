#include "optim/device_state.h"

#include <ATen/ATen.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/capture.h"

namespace lockstep::detail {
namespace {

template <class Options>
std::vector<double> adam_numbers(const Options& options) {
  const auto [beta1, beta2] = options.betas();
  return {beta1, beta2, options.eps(), options.weight_decay(), options.amsgrad() ? 1.0 : 0.0};
}

/// Returns all options of a fused optimizer except the learning rate.
std::vector<double> numbers_in(const torch::optim::OptimizerOptions& options) {
  if (const auto* adamw = dynamic_cast<const torch::optim::AdamWOptions*>(&options)) return adam_numbers(*adamw);
  if (const auto* adam = dynamic_cast<const torch::optim::AdamOptions*>(&options)) return adam_numbers(*adam);
  const auto& sgd = dynamic_cast<const torch::optim::SGDOptions&>(options);
  return {sgd.momentum(), sgd.dampening(), sgd.weight_decay(), sgd.nesterov() ? 1.0 : 0.0};
}

}  // namespace

DeviceState::ConstantOptions DeviceState::note_capture() {
  is_captured_ = true;
  last_captured_.clear();
  for (const auto& group : optimizer_->param_groups()) last_captured_.push_back(numbers_in(group.options()));
  return last_captured_;
}

const at::Tensor& DeviceState::rate(size_t group, c10::Device device) {
  const double value = optimizer_->param_groups()[group].options().get_lr();
  for (auto& rate : rates_) {
    if (rate.group != group || rate.tensor.device() != device) continue;
    if (rate.value != value && !is_capturing(device)) {
      rate.tensor.fill_(value);
      rate.value = value;
    }
    return rate.tensor;
  }
  if (is_capturing(device))
    throw UsageError(text("the first step of parameter group ", group,
                          " of an optimizer cannot be captured; run a step in which the group's parameters ",
                          "have gradients before the capture"));
  rates_.push_back({group, at::full({}, value, at::TensorOptions(device).dtype(at::kFloat)), value});
  return rates_.back().tensor;
}

const at::Tensor& DeviceState::steps(const at::Tensor& parameter, int64_t steps) {
  auto& step_count = steps_[parameter.unsafeGetTensorImpl()];
  if (!step_count.defined())
    step_count = at::full({}, static_cast<double>(steps), at::TensorOptions(parameter.device()).dtype(at::kFloat));
  return step_count;
}

int64_t DeviceState::read_step_count(const at::Tensor& parameter) const {
  return static_cast<int64_t>(steps_.at(parameter.unsafeGetTensorImpl()).item<float>());
}

void DeviceState::refresh(const ConstantOptions& captured) {
  if (!optimizer_)
    throw UsageError(
        "the captured step cannot be replayed: its optimizer was destroyed, or the optimizer's state was loaded after "
        "the capture; create a new CapturedStep");
  for (size_t g = 0; g < captured.size(); ++g)
    if (numbers_in(optimizer_->param_groups()[g].options()) != captured[g])
      throw UsageError(text("an option of parameter group ", g,
                            " other than the learning rate changed after the step was captured, which the captured "
                            "step would not notice; set cycle_momentum = false in a schedule, or create a new "
                            "CapturedStep"));
  for (auto& rate : rates_) this->rate(rate.group, rate.tensor.device());
}

}  // namespace lockstep::detail
