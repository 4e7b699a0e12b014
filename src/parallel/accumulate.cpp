#include <lockstep/accumulate.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "parallel/batch_norm/sync_batch_norm.h"
#include "parallel/ddp/ddp_state.h"

namespace lockstep::detail {
namespace {

/// A wrapper that has a weight has no SyncBatchNorm layers, so only the first accumulation walks through the modules.
bool needs_weighted_loss(const DistributedDataParallelBase& ddp) {
  auto& state = ddp_state(ddp);
  return !state.has_batch_weight() && synced_batch_norm_in(state.wrapped().module()).has_value();
}

}  // namespace

SampleWeight::SampleWeight(DistributedDataParallelBase& ddp, int64_t samples)
    : group_(ddp.process_group()),
      samples_(static_cast<double>(samples)),
      has_sync_batch_norm_(needs_weighted_loss(ddp)) {
  if (!has_sync_batch_norm_) ddp.set_batch_weight(samples_);
}

at::Tensor SampleWeight::apply(const at::Tensor& loss) {
  if (!has_sync_batch_norm_) return loss;
  if (!factor_.defined()) {
    const c10::NoGradGuard no_grad;
    auto sum = at::full({}, samples_, at::TensorOptions().dtype(at::kDouble).device(group_.device()));
    group_.all_reduce(sum);
    factor_ = samples_ * group_.size() / sum;
  }
  return loss * factor_.to(loss.device(), loss.scalar_type());
}

}  // namespace lockstep::detail
