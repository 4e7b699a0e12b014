#include "optim/device_state.h"

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/capture.h"

namespace lockstep::detail {

const at::Tensor& DeviceState::rate(size_t group, c10::Device device) {
  const double value = optimizer_->param_groups()[group].options().get_lr();
  for (auto& rate : rates_) {
    if (rate.group != group || rate.there.device() != device) continue;
    if (rate.value != value && !is_capturing(device)) {
      rate.there.fill_(value);
      rate.value = value;
    }
    return rate.there;
  }
  if (is_capturing(device))
    throw UsageError(text("the first step of parameter group ", group,
                          " of an optimizer cannot be captured; run a step in which the group's parameters ",
                          "have gradients before the capture"));
  rates_.push_back({group, at::full({}, value, at::TensorOptions(device).dtype(at::kFloat)), value});
  return rates_.back().there;
}

const at::Tensor& DeviceState::steps(const at::Tensor& parameter, int64_t steps) {
  auto& there = steps_[parameter.unsafeGetTensorImpl()];
  if (!there.defined())
    there = at::full({}, static_cast<double>(steps), at::TensorOptions(parameter.device()).dtype(at::kFloat));
  return there;
}

int64_t DeviceState::counted(const at::Tensor& parameter) const {
  return static_cast<int64_t>(steps_.at(parameter.unsafeGetTensorImpl()).item<float>());
}

void DeviceState::refresh() {
  if (!optimizer_)
    throw UsageError(
        "the captured step cannot be replayed: its optimizer was destroyed, or the optimizer's state was loaded after "
        "the capture; create a new CapturedStep");
  for (auto& rate : rates_) this->rate(rate.group, rate.there.device());
}

}  // namespace lockstep::detail
