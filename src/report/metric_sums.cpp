#include "report/metric_sums.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <thread>

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/capture.h"

namespace lockstep::detail {
namespace {

constexpr const char* kReduceNames[] = {"kMean", "kSum", "kMin", "kMax", "kLast"};

double initial_value(MetricReduction reduce) {
  if (reduce == MetricReduction::kMin) return std::numeric_limits<double>::infinity();
  if (reduce == MetricReduction::kMax) return -std::numeric_limits<double>::infinity();
  return 0;
}

/// Like std::min and std::max, but NaN stays.
double least(double a, double b) {
  return a < b || a != a ? a : b;
}
double greatest(double a, double b) {
  return a > b || a != a ? a : b;
}

void check_reduce(std::string_view name, MetricReduction before, MetricReduction now) {
  if (before != now)
    throw UsageError(text("metric '", name,
                          "' is logged with MetricReduction::", kReduceNames[static_cast<size_t>(now)],
                          ", but before with MetricReduction::", kReduceNames[static_cast<size_t>(before)],
                          "; log it in one way, or give it another name"));
}

}  // namespace

double MetricSum::result() const {
  if (reduce == MetricReduction::kMean) return weight != 0 ? value / weight : std::numeric_limits<double>::quiet_NaN();
  return value;
}

void MetricSums::add(std::string_view name, double value, const MetricOptions& options) {
  const auto& [reduce, weight, steps_only] = options;
  const bool is_mean = reduce == MetricReduction::kMean;
  // A mean over no samples is NaN and counts nothing.
  const double term = is_mean ? (weight != 0 ? value * weight : 0) : value;
  merge(std::string(name), {reduce, term, is_mean ? weight : 1, steps_only}, false);
}

MetricSums MetricSums::of_epochs() const {
  MetricSums result;
  for (const auto& [name, sum] : sums_)
    if (!sum.steps_only) result.sums_.emplace(name, sum);
  return result;
}

void MetricSums::merge(const MetricSums& other, bool keeps_last) {
  for (const auto& [name, sum] : other.sums_) merge(name, sum, keeps_last);
}

void MetricSums::merge(const std::string& name, const MetricSum& sum, bool keeps_last) {
  const auto [found, is_new] = sums_.emplace(name, sum);
  if (is_new) return;
  auto& existing = found->second;
  check_reduce(name, existing.reduce, sum.reduce);
  existing.weight += sum.weight;
  switch (sum.reduce) {
    case MetricReduction::kMean:
    case MetricReduction::kSum:
      existing.value += sum.value;
      break;
    case MetricReduction::kMin:
      existing.value = least(existing.value, sum.value);
      break;
    case MetricReduction::kMax:
      existing.value = greatest(existing.value, sum.value);
      break;
    case MetricReduction::kLast:
      if (!keeps_last) existing.value = sum.value;
      break;
  }
}

std::map<std::string, double> MetricSums::results() const {
  std::map<std::string, double> results;
  for (const auto& [name, sum] : sums_) results[name] = sum.result();
  return results;
}

c10::IValue MetricSums::to_ivalue() const {
  std::vector<c10::IValue> entries;
  for (const auto& [name, sum] : sums_)
    entries.push_back(
        c10::ivalue::Tuple::create({name, static_cast<int64_t>(sum.reduce), sum.value, sum.weight, sum.steps_only}));
  return c10::ivalue::Tuple::create(std::move(entries));
}

MetricSums MetricSums::from_ivalue(const c10::IValue& value) {
  MetricSums result;
  for (const auto& entry : value.toTupleRef().elements()) {
    const auto& parts = entry.toTupleRef().elements();
    result.merge(
        parts[0].toStringRef(),
        {static_cast<MetricReduction>(parts[1].toInt()), parts[2].toDouble(), parts[3].toDouble(), parts[4].toBool()},
        false);
  }
  return result;
}

MetricSums merged(const std::vector<MetricSums>& ranks) {
  MetricSums result;
  for (const auto& sums : ranks) result.merge(sums, /*keeps_last=*/true);
  return result;
}

// --- on a GPU

MetricSums DeviceSums::Copy::wait() const {
  constexpr auto kPollInterval = std::chrono::microseconds(200);  // c10::Event of LibTorch 1.13 cannot be waited for
  while (!arrival_->query()) std::this_thread::sleep_for(kPollInterval);
  MetricSums result;
  const double* value = values_.data_ptr<double>();
  for (size_t i = 0; i < names_.size(); ++i) {
    auto sum = sums_.at(names_[i]);
    sum.value = value[i];
    if (sum.weight != 0) result.sums_.emplace(names_[i], sum);
  }
  return result;
}

size_t DeviceSums::index_of(std::string_view name, const MetricOptions& options, c10::Device device) {
  const auto reduce = options.reduce;
  if (const auto found = slots_.find(name); found != slots_.end()) {
    check_reduce(name, found->second.sum.reduce, reduce);
    return found->second.index;
  }
  const auto first = at::full({1}, initial_value(reduce), at::TensorOptions(at::kDouble).device(device));
  values_ = values_.defined() ? at::cat({values_, first}) : first.clone();
  initial_ = initial_.defined() ? at::cat({initial_, first}) : first;
  const size_t index = slots_.size();
  slots_.emplace(name, Slot{.sum = {.reduce = reduce, .steps_only = options.steps_only}, .index = index});
  return index;
}

void DeviceSums::add(std::string_view name, const at::Tensor& value, const MetricOptions& options) {
  if (is_capturing(value.device()))
    throw UsageError(text("metric '", name,
                          "' is logged while a step is captured, but replays do not run this call; return the value "
                          "from the captured step and log the result"));
  if (values_.defined() && values_.device() != value.device())
    throw UsageError(text("metric '", name, "' is on ", value.device().str(), ", but metrics before were on ",
                          values_.device().str(), "; log values of one GPU on each rank"));
  const at::NoGradGuard no_grad;
  const auto index = static_cast<int64_t>(index_of(name, options, value.device()));
  auto sum = values_.select(0, index);
  const auto one = value.detach().reshape({});
  auto& slot = slots_.find(name)->second.sum;
  switch (options.reduce) {
    case MetricReduction::kMean:
      if (options.weight != 0) sum.add_(one, options.weight);
      slot.weight += options.weight;
      break;
    case MetricReduction::kSum:
      sum.add_(one);
      break;
    case MetricReduction::kMin:
      sum.copy_(at::minimum(sum, one));
      break;
    case MetricReduction::kMax:
      sum.copy_(at::maximum(sum, one));
      break;
    case MetricReduction::kLast:
      sum.copy_(one);
      break;
  }
  if (options.reduce != MetricReduction::kMean) ++slot.weight;
  has_values_ = true;
}

DeviceSums::Copy DeviceSums::take() {
  Copy copy;
  copy.names_.resize(slots_.size());
  for (auto& [name, slot] : slots_) {
    copy.sums_[name] = slot.sum;
    copy.names_[slot.index] = name;
    slot.sum.weight = 0;
  }
  copy.values_ = at::empty(values_.sizes(), values_.options().device(at::kCPU).pinned_memory(true));
  copy.values_.copy_(values_, /*non_blocking=*/true);
  copy.arrival_ = std::make_shared<c10::Event>(values_.device().type());
  copy.arrival_->record(c10::impl::VirtualGuardImpl(values_.device().type()).getStream(values_.device()));
  values_.copy_(initial_);
  has_values_ = false;
  return copy;
}

}  // namespace lockstep::detail
