// Which gradients a Reducer reduces together, and with what.

#include "parallel/ddp/reducer.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "comm/run_and_agree.h"
#include "parallel/ddp/averaging_hook.h"

namespace lockstep {
namespace {

constexpr int kReference = 0;  // the rank whose arrival order determines the buckets

}  // namespace

void Reducer::set_hook(CommHook hook) {
  std::lock_guard lock(mutex_);
  if (hook_) throw UsageError(group_.rank(), "a comm hook is registered already; register only one for each wrapper");
  hook_ = std::move(hook);
}

void Reducer::set_update(std::shared_ptr<detail::BucketUpdate> update) {
  detail::run_and_agree(group_, [&] { check_can_update(); });
  std::lock_guard lock(mutex_);
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

bool Reducer::updates_in_backward() const {
  std::lock_guard lock(mutex_);
  return updater_ != nullptr;
}

// A complex gradient is reduced as twice as many real numbers.
std::vector<detail::GradientSpec> Reducer::specs() const {
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
void Reducer::make_buckets() {
  buckets_.clear();
  ++plans_;
  const auto specs = this->specs();
  for (size_t b = 0; b < plan_.buckets.size(); ++b) {
    std::vector<NamedParameter> members;
    for (size_t parameter : plan_.buckets[b]) {
      states_[parameter].bucket = b;
      states_[parameter].slot = members.size();
      members.push_back(parameters_[parameter]);
    }
    buckets_.emplace_back(group_, b, specs[plan_.buckets[b].front()].dtype, members,
                          b + 1 == plan_.buckets.size() ? marks_.elements() : 0, plans_, recorder_,
                          updater_ ? updater_->prescribed(b) : std::nullopt);
  }
  if (buckets_.empty())
    buckets_.emplace_back(group_, 0, at::kFloat, std::vector<NamedParameter>(), marks_.elements(), plans_, recorder_);
}

const at::Tensor& Reducer::view_of(size_t parameter) const {
  return buckets_[states_[parameter].bucket].gradient(states_[parameter].slot);
}

bool Reducer::is_bucket_view(size_t parameter) const {
  return options_.gradient_as_bucket_view && !has_slots() && !is_sparse(parameter) &&
         view_of(parameter).scalar_type() == parameters_[parameter].tensor.scalar_type();
}

bool Reducer::may_be_computed_in_bucket(size_t parameter) const {
  return options_.in_place_gradients && is_bucket_view(parameter) && InPlaceGradients::is_for(view_of(parameter));
}

/// Lets this backward compute gradients in their buckets, unless the program still has the old gradient.
void Reducer::reserve_places() {
  std::vector<InPlaceGradients::Place> places;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& bucket = buckets_[states_[i].bucket];
    if (!states_[i].is_in && !parameters_[i].tensor.grad().defined() && may_be_computed_in_bucket(i) &&
        !bucket.is_used_elsewhere(states_[i].slot))
      places.push_back({i, view_of(i), bucket.memory()});
  }
  in_place_.reserve(places);
}

void Reducer::release_place(size_t parameter, const at::Tensor& gradient, const at::Tensor& arrived) {
  if (may_be_computed_in_bucket(parameter))
    in_place_.release(parameter, buckets_[states_[parameter].bucket], states_[parameter].slot, gradient, arrived);
}

void Reducer::start_bucket(size_t index) {
  auto& bucket = buckets_[index];
  if (has_slots()) updater_->await_slot(bucket);
  bucket.start(hook_, needs_marks());
  if (!has_slots()) return;
  for (size_t parameter : plan_.buckets[index])
    if (!frozen_[parameter]) parameters_[parameter].tensor.mutable_grad().reset();
  if (index > 0 && index + 1 < buckets_.size()) updater_->open(buckets_[index + 1]);
}

FinishReduction Reducer::start_update(const GradientBucket& bucket) {
  std::vector<char> frozen;
  for (size_t parameter : plan_.buckets[bucket.index]) frozen.push_back(frozen_[parameter]);
  return updater_->start(bucket, frozen, needs_marks());
}

// Uses rank 0's arrival order, because the buckets must be the same on all ranks. Collective.
void Reducer::rebuild_buckets() {
  if (std::exchange(buckets_rebuilt_, true) || buckets_.size() < 2) return;
  std::vector<int64_t> order;
  std::vector<char> is_in(parameters_.size());
  auto add = [&](size_t parameter) {
    if (!std::exchange(is_in[parameter], true)) order.push_back(static_cast<int64_t>(parameter));
  };
  for (size_t i = 0; i < parameters_.size(); ++i)  // reversed below: parameters without a gradient end up last
    if (states_[i].gradients == 0 && !is_sparse(i)) add(i);
  std::for_each(arrivals_.rbegin(), arrivals_.rend(), [&](size_t parameter) {
    if (!is_sparse(parameter)) add(parameter);
  });
  std::reverse(order.begin(), order.end());
  auto agreed = at::tensor(order).to(group_.device());
  group_.broadcast(agreed, kReference);
  agreed = agreed.cpu();
  const auto* index = agreed.data_ptr<int64_t>();
  const std::vector<size_t> arrivals(index, index + agreed.numel());
  if (has_slots()) {
    if (updater_->reorder(plan_, arrivals)) make_buckets();
    return;
  }
  auto plan = detail::plan_buckets(specs(), options_.limits, arrivals);
  if (plan == plan_) return;
  plan_ = std::move(plan);
  std::vector<at::Tensor> old;
  for (size_t i = 0; i < parameters_.size(); ++i) old.push_back(is_sparse(i) ? at::Tensor() : view_of(i));
  make_buckets();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto& gradient = parameters_[i].tensor.mutable_grad();
    if (is_sparse(i) || !gradient.defined() || !same_memory(gradient, old[i])) continue;
    write(view_of(i), old[i]);
    gradient = view_of(i);
  }
}

}  // namespace lockstep
