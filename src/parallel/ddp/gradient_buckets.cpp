#include "parallel/ddp/gradient_buckets.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>

#include "parallel/ddp/averaging_hook.h"

namespace lockstep {
namespace {

constexpr int kReference = 0;  // the rank whose arrival order determines the buckets

}  // namespace

GradientBuckets::GradientBuckets(const std::vector<NamedParameter>& parameters, const std::vector<char>& sparse,
                                 ProcessGroup group, const Options& options, const ParameterUsage& usage,
                                 const StepRecorder& recorder)
    : parameters_(parameters),
      sparse_(sparse),
      group_(std::move(group)),
      options_(options),
      usage_(usage),
      recorder_(recorder),
      locations_(parameters.size()) {
  std::vector<size_t> order;
  for (size_t i = parameters_.size(); i-- > 0;)
    if (!is_sparse(i)) order.push_back(i);
  plan_ = detail::plan_buckets(specs(), options_.limits, order);
  make_buckets();
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (may_be_computed_in_bucket(i)) InPlaceGradients::install();
}

// --- layout

// A complex gradient is reduced as twice as many real numbers.
std::vector<detail::GradientSpec> GradientBuckets::specs() const {
  std::vector<detail::GradientSpec> specs;
  for (const auto& [name, tensor] : parameters_) {
    if (tensor.is_complex())
      specs.push_back({2 * tensor.numel(), c10::toRealValueType(tensor.scalar_type()), tensor.device()});
    else
      specs.push_back({tensor.numel(), options_.reduce_dtype.value_or(tensor.scalar_type()), tensor.device()});
  }
  return specs;
}

// The last bucket has extra elements for the marks. If all gradients are sparse, it has nothing else.
void GradientBuckets::make_buckets() {
  buckets_.clear();
  ++plans_;
  const auto specs = this->specs();
  const auto marks = usage_.mark_elements();
  for (size_t b = 0; b < plan_.buckets.size(); ++b) {
    std::vector<NamedParameter> members;
    for (size_t parameter : plan_.buckets[b]) {
      locations_[parameter] = {b, members.size()};
      members.push_back(parameters_[parameter]);
    }
    buckets_.emplace_back(group_, b, specs[plan_.buckets[b].front()].dtype, members,
                          b + 1 == plan_.buckets.size() ? marks : 0, plans_, recorder_,
                          updater_ ? updater_->prescribed(b) : std::nullopt);
  }
  if (buckets_.empty())
    buckets_.emplace_back(group_, 0, at::kFloat, std::vector<NamedParameter>(), marks, plans_, recorder_);
}

const at::Tensor& GradientBuckets::view(size_t parameter) const {
  const auto [bucket, slot] = locations_[parameter];
  return buckets_[bucket].gradient(slot);
}

bool GradientBuckets::is_view(size_t parameter) const {
  return options_.gradient_as_bucket_view && !has_slots() && !is_sparse(parameter) &&
         view(parameter).scalar_type() == parameters_[parameter].tensor.scalar_type();
}

std::vector<StepTimes::Bucket> GradientBuckets::times() const {
  std::vector<StepTimes::Bucket> times;
  for (const auto& bucket : buckets_) times.push_back(bucket.times());
  return times;
}

void GradientBuckets::rebuild(const std::vector<size_t>& arrivals) {
  if (std::exchange(is_rebuilt_, true) || buckets_.size() < 2) return;
  const auto order = agree_on_order(arrivals);
  if (has_slots()) {
    if (updater_->reorder(plan_, order)) make_buckets();
    return;
  }
  auto plan = detail::plan_buckets(specs(), options_.limits, order);
  if (plan == plan_) return;
  plan_ = std::move(plan);
  std::vector<at::Tensor> old;
  for (size_t i = 0; i < parameters_.size(); ++i) old.push_back(is_sparse(i) ? at::Tensor() : view(i));
  make_buckets();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto& gradient = parameters_[i].tensor.mutable_grad();
    if (is_sparse(i) || !gradient.defined() || !same_memory(gradient, old[i])) continue;
    write(view(i), old[i]);
    gradient = view(i);
  }
}

/// Returns the dense parameters in the order of rank 0's last gradients, because the buckets must be the same on all
/// ranks. Parameters without a gradient come last.
std::vector<size_t> GradientBuckets::agree_on_order(const std::vector<size_t>& arrivals) const {
  std::vector<char> is_added(sparse_);  // sparse gradients are in no bucket
  std::vector<int64_t> order;
  std::for_each(arrivals.rbegin(), arrivals.rend(), [&](size_t parameter) {
    if (!std::exchange(is_added[parameter], 1)) order.push_back(static_cast<int64_t>(parameter));
  });
  std::reverse(order.begin(), order.end());
  for (size_t i = parameters_.size(); i-- > 0;)
    if (!is_added[i]) order.push_back(static_cast<int64_t>(i));
  auto agreed = at::tensor(order).to(group_.device());
  group_.broadcast(agreed, kReference);
  agreed = agreed.cpu();
  const auto* index = agreed.data_ptr<int64_t>();
  return {index, index + agreed.numel()};
}

// --- gradients

void GradientBuckets::begin_backward(bool has_marks) {
  has_marks_ = has_marks;
  started_ = 0;
  for (auto& bucket : buckets_) bucket.reset();
  if (updater_) updater_->begin_backward(buckets_);
}

bool GradientBuckets::may_be_computed_in_bucket(size_t parameter) const {
  return options_.in_place_gradients && is_view(parameter) && InPlaceGradients::is_for(view(parameter));
}

// Excludes gradients of which the program still holds the old tensor.
void GradientBuckets::reserve_in_place(const std::vector<char>& is_in) {
  std::vector<InPlaceGradients::Place> places;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto [bucket, slot] = locations_[i];
    if (!is_in[i] && !parameters_[i].tensor.grad().defined() && may_be_computed_in_bucket(i) &&
        !buckets_[bucket].is_used_elsewhere(slot))
      places.push_back({i, view(i), buckets_[bucket].memory()});
  }
  in_place_.reserve(places);
}

void GradientBuckets::release_place(size_t parameter, const at::Tensor& gradient, const at::Tensor& arrived) {
  const auto [bucket, slot] = locations_[parameter];
  if (may_be_computed_in_bucket(parameter)) in_place_.release(parameter, buckets_[bucket], slot, gradient, arrived);
}

void GradientBuckets::put(size_t parameter, const at::Tensor& gradient, const at::Tensor& arrived) {
  release_place(parameter, gradient, arrived);
  const auto [bucket, slot] = locations_[parameter];
  buckets_[bucket].put(slot, gradient);
}

void GradientBuckets::release(size_t parameter) {
  if (is_view(parameter))
    parameters_[parameter].tensor.mutable_grad() = view(parameter);
  else if (buckets_[locations_[parameter].bucket].is_open())
    parameters_[parameter].tensor.mutable_grad().reset();
}

const at::Tensor& GradientBuckets::read(size_t parameter) {
  buckets_[locations_[parameter].bucket].flush_pending_copies();
  return view(parameter);
}

void GradientBuckets::publish(size_t parameter) {
  auto& gradient = parameters_[parameter].tensor.mutable_grad();
  const auto& average = view(parameter);
  if (updater_) {
    gradient.reset();  // this rank's own gradient is no longer needed
  } else if (is_view(parameter)) {
    if (!gradient.defined() || !same_memory(gradient, average)) gradient = average;
  } else if (gradient.defined() && gradient.layout() == c10::kStrided) {
    write(gradient, average);
  } else {
    gradient = average.to(parameters_[parameter].tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  }
}

// --- reductions

// The order of the plan is the same on all ranks, regardless of the order in which gradients arrive. The last bucket is
// reduced at the end of backward, which is near, on the calling thread; this avoids waking up another thread.
void GradientBuckets::start_full() {
  for (; started_ + 1 < buckets_.size() && buckets_[started_].is_full(); ++started_) start(started_);
}

void GradientBuckets::start(size_t index) {
  auto& bucket = buckets_[index];
  if (has_slots()) updater_->await_slot(bucket);
  bucket.start(hook_, has_marks_);
  if (!has_slots()) return;
  for (size_t parameter : plan_.buckets[index])
    if (!usage_.is_frozen(parameter)) parameters_[parameter].tensor.mutable_grad().reset();
  if (index > 0 && index + 1 < buckets_.size()) updater_->open(buckets_[index + 1]);
}

void GradientBuckets::finish_backward() {
  start_full();
  if (hook_)
    start(buckets_.size() - 1);
  else
    buckets_.back().reduce();
  await_all();
}

void GradientBuckets::await_all() {
  for (auto& bucket : buckets_)
    if (bucket.is_under_way()) bucket.finish();
}

void GradientBuckets::reduce_zeros(bool has_marks) {
  for (size_t i = 0; i < parameters_.size(); ++i) release_place(i, {}, {});
  for (auto& bucket : buckets_) {
    bucket.clear();
    bucket.start(hook_, has_marks);
  }
  await_all();
}

void GradientBuckets::abandon() {
  if (updater_) updater_->abandon();
  for (auto& bucket : buckets_) bucket.reset();
}

// --- updates during backward

void GradientBuckets::set_update(std::shared_ptr<detail::BucketUpdate> update) {
  buckets_.clear();  // the update can use their memory
  try {
    updater_ = std::make_unique<BucketUpdater>(std::move(update), group_, parameters_, plan_);
    hook_ = AveragingHook{[this](const GradientBucket& bucket, const ProcessGroup&) { return start_update(bucket); }};
    make_buckets();
  } catch (...) {
    updater_.reset();
    hook_ = nullptr;
    make_buckets();
    throw;
  }
}

FinishReduction GradientBuckets::start_update(const GradientBucket& bucket) {
  std::vector<char> frozen;
  for (size_t parameter : plan_.buckets[bucket.index]) frozen.push_back(usage_.is_frozen(parameter));
  return updater_->start(bucket, frozen, has_marks_);
}

}  // namespace lockstep
