#include "optim/zero/overlapped_update.h"

#include <algorithm>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/capture.h"
#include "comm/run_and_agree.h"

namespace lockstep::detail {

std::vector<BucketUpdate::Layout> OverlappedUpdate::prepare(const Plan& plan) {
  run_and_agree(shard().group(), [&] {
    const auto refuse = [&](auto&&... why) {
      throw UsageError(shard().rank(), text("ZeroRedundancyOptimizer: ", why...));
    };
    for (size_t i = 0; i < parameters().size(); ++i)
      if (!at::isFloatingType(parameters().tensor(i).scalar_type()))
        refuse(parameters().name_of(i), " has dtype ", parameters().tensor(i).scalar_type(),
               ", expected a floating-point one; leave the option overlap out");
    for (const auto& [name, parameter] : plan.parameters)
      if (!parameters().find(parameter))
        refuse("parameter '", name,
               "' of the wrapper is not a parameter of the optimizer; with the option overlap, one optimizer has all "
               "parameters");
  });
  return prepare_buckets(plan);
}

void OverlappedUpdate::check_optimizer_exists() const {
  if (shard().is_released())
    throw UsageError(shard().rank(),
                     "backward: the ZeroRedundancyOptimizer, which has the option overlap, was destroyed; keep it as "
                     "long as the wrapper runs backward");
}

void OverlappedUpdate::begin_step_in_backward() {
  shard().restore_parameters();
  parameters().note_values();
  shard().copy_options();
  shard().mark_incomplete();
}

void OverlappedUpdate::note_gradient(const at::Tensor& parameter) {
  const size_t index = index_of(parameter);
  if (std::exchange(arrived_[index], 1))
    throw UsageError(
        shard().rank(),
        text(parameters().name_of(index), waits_for_step() ? " has an averaged gradient of" : " was updated in",
             " an earlier backward already; call step() after each backward, and run all but the last backward of an "
             "accumulation under no_sync()"));
}

void OverlappedUpdate::note_update(const at::Tensor& parameter) {
  note_gradient(parameter);
  parameter.unsafeGetTensorImpl()->bump_version();
  parameters().note_values(index_of(parameter));
}

void OverlappedUpdate::begin_step() {
  check_finished();
  if (std::find(arrived_.begin(), arrived_.end(), 1) == arrived_.end())
    throw UsageError(shard().rank(),
                     "step() was called without a backward since the last step; with the option overlap call them in "
                     "turn, and capture both in one CapturedStep");
}

void OverlappedUpdate::end_step_in_backward(const at::Tensor& skip) {
  if (skip.defined())
    throw UsageError(
        shard().rank(),
        "ZeroRedundancyOptimizer: a GradScaler cannot be used with Overlap::kUpdate, because the parameters "
        "are updated before it has looked at all gradients; use Overlap::kGradients");
  if (is_capturing(shard().group().device()))  // backward runs on another thread, which does not record
    Recording::before_replay([shard = shard_] { shard->before_replay(); });
  end_step();
}

void OverlappedUpdate::end_step() {
  std::fill(arrived_.begin(), arrived_.end(), 0);
  forget_step();
  shard().mark_complete();
}

void OverlappedUpdate::abandon() {
  end_step();
}

}  // namespace lockstep::detail
