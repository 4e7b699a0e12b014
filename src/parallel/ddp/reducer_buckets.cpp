// Which gradients a Reducer reduces together.

#include "parallel/ddp/reducer.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>

namespace lockstep {
namespace {

constexpr int kReference = 0;  // the rank whose arrival order determines the buckets

/// Whether only `gradient`, which is also .grad(), uses its memory, and `arrived`, which autograd drops when the hook
/// returns. The latter may be a view, which keeps its base.
bool is_memory_its_own(const at::Tensor& gradient, const at::Tensor& arrived) {
  constexpr size_t kHandles = 2;  // .grad(), and the caller's
  if (gradient.use_count() > kHandles) return false;
  size_t users = 1;
  const bool is_dense = arrived.defined() && arrived.layout() == c10::kStrided;
  if (is_dense && !arrived.is_same(gradient) && arrived.is_alias_of(gradient)) {
    ++users;
    if (arrived.is_view()) {
      if (arrived._base().use_count() > 1) return false;
      ++users;
    }
  }
  return gradient.storage().use_count() <= users;
}

}  // namespace

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
    std::optional<Bucket::Prescribed> prescribed;
    if (!layouts_.empty()) prescribed = {layouts_[prescribed_[b]], slots_[b % slots_.size()]};
    buckets_.emplace_back(group_, b, specs[plan_.buckets[b].front()].dtype, members,
                          b + 1 == plan_.buckets.size() ? marks_.elements() : 0, plans_, recorder_, prescribed);
  }
  if (buckets_.empty())
    buckets_.emplace_back(group_, 0, at::kFloat, std::vector<NamedParameter>(), marks_.elements(), plans_, recorder_);
}

const at::Tensor& Reducer::view_of(size_t parameter) const {
  return buckets_[states_[parameter].bucket].gradient(states_[parameter].slot);
}

bool Reducer::is_bucket_view(size_t parameter) const {
  return options_.gradient_as_bucket_view && layouts_.empty() && !is_sparse(parameter) &&
         view_of(parameter).scalar_type() == parameters_[parameter].tensor.scalar_type();
}

bool Reducer::may_be_computed_in_bucket(size_t parameter) const {
  return is_bucket_view(parameter) && view_of(parameter).is_cpu() &&
         view_of(parameter).nbytes() >= GradientPlaces::kLeastBytes;
}

/// Lets this backward compute gradients in their buckets, unless the program still has the old gradient.
void Reducer::offer_places() {
  std::vector<GradientPlaces::Place> places;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& bucket = buckets_[states_[i].bucket];
    if (!states_[i].is_in && !parameters_[i].tensor.grad().defined() && may_be_computed_in_bucket(i) &&
        !bucket.is_used_elsewhere(states_[i].slot))
      places.push_back({i, view_of(i), bucket.memory()});
  }
  places_.offer(places);
}

/// Call it before the parameter's place in its bucket is written to. If a tensor was allocated there that is not the
/// gradient, or whose memory other tensors use as well, the bucket leaves its memory to it and moves.
void Reducer::vacate_place(size_t parameter, const at::Tensor& gradient, const at::Tensor& arrived) {
  if (!may_be_computed_in_bucket(parameter) || !GradientPlaces::is_taken(view_of(parameter))) return;
  const bool is_there = gradient.defined() && same_memory(gradient, view_of(parameter));
  if (is_there && is_memory_its_own(gradient, arrived)) return;
  places_.exclude(parameter);
  places_.withdraw();  // those of other parameters are in the old memory, and the new memory must not be in a place
  buckets_[states_[parameter].bucket].move();
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
  if (!layouts_.empty()) return reorder_buckets(arrivals);

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
