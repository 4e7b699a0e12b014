#include "parallel/ddp/bucket_updater.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>
#include <utility>

#include <ATen/ATen.h>

namespace lockstep {
namespace {

using detail::BucketUpdate;

constexpr size_t kSlots = 2;

BucketUpdate::Plan plan_of(const std::vector<NamedParameter>& parameters, const BucketPlan& plan) {
  BucketUpdate::Plan result{{}, plan.buckets};
  for (const auto& [name, tensor] : parameters) result.parameters.emplace_back(name, tensor);
  return result;
}

}  // namespace

BucketUpdater::BucketUpdater(std::shared_ptr<BucketUpdate> update, const ProcessGroup& group,
                             const std::vector<NamedParameter>& parameters, const BucketPlan& plan)
    : update_(std::move(update)),
      layouts_(update_->prepare(plan_of(parameters, plan))),
      index_in_update_(plan.buckets.size()) {
  std::iota(index_in_update_.begin(), index_in_update_.end(), size_t{0});
  int64_t bytes = 0;
  for (size_t b = 0; b < layouts_.size(); ++b)
    bytes = std::max(
        bytes, layouts_[b].elements * static_cast<int64_t>(parameters[plan.buckets[b].front()].tensor.element_size()));
  for (size_t slot = 0; slot < std::min(kSlots, layouts_.size()); ++slot)
    slots_.push_back(group.allocate({bytes}, at::kByte).zero_());
  users_.resize(slots_.size());
}

std::optional<Bucket::Prescribed> BucketUpdater::prescribed(size_t bucket) const {
  if (!has_slots()) return std::nullopt;
  return Bucket::Prescribed{layouts_[index_in_update_[bucket]], slots_[bucket % slots_.size()]};
}

bool BucketUpdater::reorder(BucketPlan& plan, const std::vector<size_t>& arrivals) {
  std::vector<size_t> full_at(plan.buckets.size()), order(plan.buckets.size());
  std::unordered_map<size_t, size_t> bucket_of;  // by parameter
  for (size_t b = 0; b < plan.buckets.size(); ++b)
    for (size_t parameter : plan.buckets[b]) bucket_of.emplace(parameter, b);
  for (size_t at = 0; at < arrivals.size(); ++at) full_at[bucket_of.at(arrivals[at])] = at;
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return full_at[a] < full_at[b]; });
  if (std::is_sorted(order.begin(), order.end())) return false;
  const auto old_plan = plan;
  const auto old_index = index_in_update_;
  for (size_t b = 0; b < order.size(); ++b) {
    plan.buckets[b] = old_plan.buckets[order[b]];
    index_in_update_[b] = old_index[order[b]];
  }
  return true;
}

void BucketUpdater::begin_backward(std::vector<Bucket>& buckets) {
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    users_[slot].reset();  // the caller has waited for it
    open(buckets[slot]);
  }
}

void BucketUpdater::await_slot(const Bucket& bucket) {
  if (!has_slots() || bucket.is_open()) return;
  if (auto& user = user_of_slot(bucket.contents().index)) user->wait();
}

// The bucket that used the slot before is probably reduced.
void BucketUpdater::open(Bucket& bucket) {
  if (!has_slots() || !bucket.contents().buffer.is_cpu()) return;
  if (auto& user = user_of_slot(bucket.contents().index)) user->wait();
  bucket.open();
}

// The last bucket ends with the marks. It is updated on this thread, because nothing is left to do meanwhile.
FinishReduction BucketUpdater::start(const GradientBucket& bucket, const std::vector<char>& frozen, bool has_marks) {
  BucketUpdate::Bucket updated{
      has_slots() ? index_in_update_[bucket.index] : bucket.index, bucket.buffer, {}, {}, {}, {}};
  for (size_t slot = 0; slot < frozen.size(); ++slot) {
    if (frozen[slot]) continue;
    updated.parameters.push_back(bucket.parameters[slot]);
    updated.gradients.push_back(bucket.gradients[slot]);
  }
  if (!bucket.is_last) {
    auto started = update_->update(updated);
    if (has_slots()) user_of_slot(bucket.index) = started.reduced;
    return std::move(started.finish);
  }
  if (has_marks) {
    updated.extra = bucket.gradients.back();
    updated.averaged_extra = at::empty_like(updated.extra);
  }
  update_->update_and_finish(updated);
  if (has_marks) updated.extra.copy_(updated.averaged_extra);
  return [] {};
}

}  // namespace lockstep
