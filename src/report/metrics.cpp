#include <lockstep/metrics.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/capture.h"

namespace lockstep {
namespace {

/// The tensor as float64 on the metric's device, without blocking.
at::Tensor as_summand(const at::Tensor& tensor, c10::Device device, const char* call) {
  if (tensor.is_cuda() && tensor.device() != device)
    throw UsageError(text(call, ": the tensor is on ", tensor.device(), ", but the metric is on ", device,
                          ", and a copy would block; construct the metric for ", tensor.device()));
  return tensor.detach().to(tensor.options().device(device).dtype(at::kDouble), /*non_blocking=*/true);
}

std::vector<double> read_sums(const at::Tensor& sums) {
  const auto here = sums.cpu();
  const double* first = here.data_ptr<double>();
  return {first, first + here.numel()};
}

void refuse_captured_compute(const at::Tensor& sums) {
  if (detail::is_capturing(sums.device()))
    throw UsageError("compute() of a metric blocks, so it cannot be captured in a CUDA graph; call it after the step");
}

double ratio(const std::vector<double>& sums) {
  return sums[0] / sums[1];  // NaN without samples
}

}  // namespace

// --- SumMetric

SumMetric::SumMetric(int64_t count, c10::Device device) {
  if (count < 1) throw UsageError(text("SumMetric: count is ", count, ", expected 1 or more"));
  sums_ = at::zeros({count}, at::TensorOptions(at::kDouble).device(device));
}

void SumMetric::add(const at::Tensor& values) {
  const c10::NoGradGuard no_grad;
  if (values.sizes() != sums_.sizes())
    throw UsageError(text("SumMetric::add: the values have shape ", values.sizes(), ", expected ", sums_.sizes(),
                          ": one value for each sum"));
  sums_.add_(as_summand(values, sums_.device(), "SumMetric::add"));
}

std::vector<double> SumMetric::compute(const ProcessGroup& group, const CallOptions& options) const {
  refuse_captured_compute(sums_);
  const c10::NoGradGuard no_grad;
  const auto all = sums_.to(group.device(), at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  group.all_reduce(all, ReduceOp::kSum, options);
  return read_sums(all);
}

std::vector<double> SumMetric::compute() const {
  refuse_captured_compute(sums_);
  return read_sums(sums_);
}

void SumMetric::reset() {
  sums_.zero_();
}

Value SumMetric::state_dict() const {
  return sums_.clone();
}

void SumMetric::load_state_dict(const Value& state) {
  const auto& sums = state.tensor();
  if (sums.sizes() != sums_.sizes())
    throw UsageError(text("a metric's load_state_dict: the saved sums have shape ", sums.sizes(), ", expected ",
                          sums_.sizes(), "; load the state of the same kind of metric"));
  sums_.copy_(sums);
}

// --- MeanMetric

void MeanMetric::add(const at::Tensor& values, double weight) {
  if (weight == 0) return;
  const c10::NoGradGuard no_grad;
  const auto wide = as_summand(values, sums_.device(), "MeanMetric::add");
  sums_.add(
      at::stack({wide.sum() * weight, at::full({}, weight * static_cast<double>(values.numel()), wide.options())}));
}

void MeanMetric::add(const at::Tensor& values, const at::Tensor& weights) {
  const c10::NoGradGuard no_grad;
  if (values.sizes() != weights.sizes())
    throw UsageError(text("MeanMetric::add: the weights have shape ", weights.sizes(), ", expected ", values.sizes(),
                          ": one weight for each value"));
  const auto wide = as_summand(values, sums_.device(), "MeanMetric::add");
  const auto factors = as_summand(weights, sums_.device(), "MeanMetric::add");
  sums_.add(at::stack({(wide * factors).masked_fill(factors.eq(0), 0).sum(), factors.sum()}));
}

void MeanMetric::add(double value, double weight) {
  add(at::full({}, value, at::TensorOptions(at::kDouble).device(sums_.device())), weight);
}

double MeanMetric::compute(const ProcessGroup& group, const CallOptions& options) const {
  return ratio(sums_.compute(group, options));
}

double MeanMetric::compute() const {
  return ratio(sums_.compute());
}

// --- Accuracy

Accuracy::Accuracy(c10::Device device, const AccuracyOptions& options) : options_(options), sums_(2, device) {
  if (options.top_k < 1) throw UsageError(text("Accuracy: top_k is ", options.top_k, ", expected 1 or more"));
}

void Accuracy::add(const at::Tensor& outputs, const at::Tensor& labels) {
  const c10::NoGradGuard no_grad;
  const auto refuse = [](auto&&... why) { throw UsageError(text("Accuracy::add: ", why...)); };
  auto without_classes = outputs.sizes().vec();
  if (outputs.dim() >= 2) without_classes.erase(without_classes.begin() + 1);
  if (outputs.dim() < 2 || labels.sizes() != at::IntArrayRef(without_classes))
    refuse("outputs of shape ", outputs.sizes(), " and labels of shape ", labels.sizes(),
           ", expected [N, classes, ...] and [N, ...]");
  if (!at::isIntegralType(labels.scalar_type(), /*includeBool=*/false))
    refuse("labels of dtype ", labels.scalar_type(), ", expected integers: the index of a class for each sample");
  if (outputs.size(1) < options_.top_k)
    refuse("outputs for ", outputs.size(1), " classes, expected at least top_k, which is ", options_.top_k);

  auto is_correct = options_.top_k == 1 ? outputs.argmax(1).eq(labels)
                                        : std::get<1>(outputs.topk(options_.top_k, 1)).eq(labels.unsqueeze(1)).any(1);
  if (!options_.ignore_index) {
    const auto correct = is_correct.sum();
    sums_.add(at::stack({correct, at::full({}, labels.numel(), correct.options())}));
    return;
  }
  const auto counts = labels.ne(*options_.ignore_index);
  sums_.add(at::stack({is_correct.logical_and(counts).sum(), counts.sum()}));
}

double Accuracy::compute(const ProcessGroup& group, const CallOptions& options) const {
  return ratio(sums_.compute(group, options));
}

double Accuracy::compute() const {
  return ratio(sums_.compute());
}

}  // namespace lockstep
