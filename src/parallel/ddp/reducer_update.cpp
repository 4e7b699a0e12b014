// Updates of parameters in backward, in place of averaged gradients.

#include "parallel/ddp/reducer.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "parallel/ddp/averaging_hook.h"

namespace lockstep {
namespace {

constexpr size_t kSlots = 2;

}  // namespace

void Reducer::check_can_update() const {
  const auto refuse = [&](const char* what, const char* remedy) {
    throw UsageError(group_.rank(), text("update_in_backward cannot be combined with ", what, "; ", remedy));
  };
  if (hook_) refuse("a comm hook", "register no hook");
  if (options_.allow_unused)
    refuse("find_unused_parameters", "a parameter must not be updated in a step that does not use it");
  if (options_.check_finite) refuse("check_finite", "it finds a bad gradient only after other parameters are updated");
  if (options_.reduce_dtype) refuse("reduce_dtype", "gradients are summed in the dtype of the parameters");
  if (!options_.sparse_parameters.empty()) refuse("sparse_parameters", "only dense gradients are supported");
}

// If the update prescribes layouts, the buckets share two slots: while one bucket is reduced, the next one is filled. A
// gradient that has been copied there is released, so gradients take little memory.
void Reducer::set_update(std::shared_ptr<BucketUpdate> update) {
  std::lock_guard lock(mutex_);
  check_can_update();
  BucketUpdate::Plan plan{{}, plan_.buckets};
  for (const auto& [name, tensor] : parameters_) plan.parameters.emplace_back(name, tensor);
  buckets_.clear();  // the update can use their memory
  try {
    layouts_ = update->prepare(group_, plan);
  } catch (...) {
    make_buckets();
    throw;
  }
  update_ = std::move(update);
  hook_ = AveragingHook{[this](const GradientBucket& bucket, const ProcessGroup&) { return start_update(bucket); }};
  if (layouts_.empty()) return make_buckets();
  prescribed_.resize(layouts_.size());
  std::iota(prescribed_.begin(), prescribed_.end(), size_t{0});
  int64_t bytes = 0;
  for (size_t b = 0; b < layouts_.size(); ++b)
    bytes = std::max(bytes, layouts_[b].elements * static_cast<int64_t>(c10::elementSize(
                                                       parameters_[plan_.buckets[b].front()].tensor.scalar_type())));
  for (size_t slot = 0; slot < std::min(kSlots, layouts_.size()); ++slot)
    slots_.push_back(group_.allocate({bytes}, at::kByte).zero_());
  slot_users_.resize(slots_.size());
  make_buckets();
}

bool Reducer::updates_in_backward() const {
  std::lock_guard lock(mutex_);
  return update_ != nullptr;
}

/// Sorts the buckets, whose parameters stay the same, by the time at which they are full.
void Reducer::reorder_buckets(const std::vector<size_t>& arrivals) {
  std::vector<size_t> full_at(buckets_.size()), order(buckets_.size());
  for (size_t at = 0; at < arrivals.size(); ++at) full_at[states_[arrivals[at]].bucket] = at;
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return full_at[a] < full_at[b]; });
  if (std::is_sorted(order.begin(), order.end())) return;
  const auto old_plan = plan_;
  const auto old_prescribed = prescribed_;
  for (size_t b = 0; b < order.size(); ++b) {
    plan_.buckets[b] = old_plan.buckets[order[b]];
    prescribed_[b] = old_prescribed[order[b]];
  }
  make_buckets();
}

void Reducer::start_bucket(size_t index) {
  auto& bucket = buckets_[index];
  if (layouts_.empty()) return bucket.start(hook_, needs_marks());
  if (auto& user = slot_users_[index % slots_.size()]; user && !bucket.is_open()) user->wait();
  bucket.start(hook_, needs_marks());
  for (size_t parameter : plan_.buckets[index])
    if (!frozen_[parameter]) parameters_[parameter].tensor.mutable_grad().reset();
  if (index > 0) open_bucket(index + 1);
}

/// Lets the bucket use its slot. The bucket that used it before is probably reduced.
void Reducer::open_bucket(size_t index) {
  if (index >= buckets_.size() || !group_.device().is_cpu()) return;
  if (auto& user = slot_users_[index % slots_.size()]) user->wait();
  buckets_[index].open();
}

// The last bucket ends with the marks: see AveragingHook. It is updated on this thread, because nothing is left to do
// meanwhile.
FinishReduction Reducer::start_update(const GradientBucket& bucket) {
  const size_t index = layouts_.empty() ? bucket.index : prescribed_[bucket.index];
  BucketUpdate::Bucket updated{index, bucket.buffer, {}, {}, {}, {}};
  for (size_t slot = 0; slot < plan_.buckets[bucket.index].size(); ++slot) {
    if (frozen_[plan_.buckets[bucket.index][slot]]) continue;
    updated.parameters.push_back(bucket.parameters[slot]);
    updated.gradients.push_back(bucket.gradients[slot]);
  }
  if (!bucket.is_last) {
    auto started = update_->update(updated);
    if (!slots_.empty()) slot_users_[bucket.index % slots_.size()] = started.reduced;
    return std::move(started.finish);
  }
  if (needs_marks()) {
    updated.extra = bucket.gradients.back();
    updated.averaged_extra = at::empty_like(updated.extra);
  }
  update_->update_and_finish(updated);
  if (needs_marks()) updated.extra.copy_(updated.averaged_extra);
  return [] {};
}

}  // namespace lockstep
