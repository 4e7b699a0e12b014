#include "parallel/ddp/batch_weight.h"

#include <cmath>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/capture.h"

namespace lockstep {

BatchWeight::BatchWeight(ProcessGroup group) : group_(std::move(group)), sum_(group_.size()) {}

void BatchWeight::check(double samples) const {
  if (!(samples >= 0) || !std::isfinite(samples))
    throw UsageError(group_.rank(),
                     text("the batch weight is ", samples,
                          ", expected a finite number of 0 or more; pass the number of samples in the batch"));
}

void BatchWeight::set(double samples) {
  check(samples);
  is_set_ = true;
  samples_ = samples;
  if (group_.device().is_cuda()) return set_on_device();
  adding_ = at::full({1}, samples_, at::kDouble);
  work_ = group_.all_reduce_async(adding_);
}

void BatchWeight::set_on_device() {
  const c10::NoGradGuard no_grad;
  auto& [samples, sum, factor, is_empty] = on_device_;
  if (!samples.defined()) {
    const auto options = at::TensorOptions().dtype(at::kDouble).device(group_.device());
    samples = at::empty({1}, options);
    sum = at::empty({1}, options);
    factor = at::empty({}, options);
    is_empty = at::empty({}, options.dtype(at::kBool));
  }
  samples.fill_(samples_);
  sum.copy_(samples);
  group_.all_reduce_async(sum).wait();  // orders streams; does not block the host
  factor.copy_((samples * group_.size() / sum)[0]);
  is_empty.copy_((samples == 0)[0]);
}

void BatchWeight::set_in_join(double samples) {
  check(samples);
  in_join_ = samples;
}

void BatchWeight::leave_join() {
  in_join_.reset();
  round_.reset();
}

void BatchWeight::wait_for_sum() {
  if (work_) {
    work_->wait();
    work_.reset();
    sum_ = adding_.item<double>();
  }
  if ((round_ ? round_->sum : sum_) > 0) return;
  throw UsageError(group_.rank(),
                   "the batch weights are 0 on all ranks, so there are no samples to average over; skip the "
                   "step when no rank has samples");
}

at::Tensor BatchWeight::apply(const at::Tensor& gradient) {
  wait_for_sum();
  const bool reads_device = is_set_ && !round_ && group_.device().is_cuda();
  if (reads_device && detail::is_capturing(group_.device()))  // the weight can change before each replay
    return (gradient * on_device_.factor).masked_fill(on_device_.is_empty, 0);
  const auto [samples, sum] = round_.value_or(Share{samples_, sum_});
  if (samples == 0) return at::zeros_like(gradient);
  if (reads_device) return gradient * on_device_.factor;
  const double factor = samples * group_.size() / sum;
  return factor == 1 ? gradient : gradient * factor;
}

}  // namespace lockstep
