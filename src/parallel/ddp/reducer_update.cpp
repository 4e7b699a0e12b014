// Updates of parameters in backward, in place of averaged gradients.

#include "parallel/ddp/reducer.h"

#include <utility>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "parallel/ddp/averaging_hook.h"

namespace lockstep {

void Reducer::check_can_update() const {
  std::lock_guard lock(mutex_);
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

void Reducer::set_update(std::shared_ptr<BucketUpdate> update) {
  std::lock_guard lock(mutex_);
  hook_ = AveragingHook{[this](const GradientBucket& bucket, const ProcessGroup&) { return start_update(bucket); }};
  update_ = std::move(update);
}

// The last bucket ends with the marks: see AveragingHook. It is updated on this thread, because nothing is left to do
// meanwhile.
FinishReduction Reducer::start_update(const GradientBucket& bucket) const {
  BucketUpdate::Bucket updated{bucket.buffer, {}, {}, {}, {}};
  for (size_t slot = 0; slot < bucket.parameters.size(); ++slot) {
    if (frozen_[plan_.buckets[bucket.index][slot]]) continue;
    updated.parameters.push_back(bucket.parameters[slot]);
    updated.gradients.push_back(bucket.gradients[slot]);
  }
  if (!bucket.is_last) return [work = update_->update(updated)] { work.wait(); };
  updated.extra = bucket.gradients.back();
  updated.averaged_extra = at::empty_like(updated.extra);
  update_->update_and_wait(updated);
  updated.extra.copy_(updated.averaged_extra);
  return [] {};
}

}  // namespace lockstep
