#include <lockstep/zero_redundancy_optimizer.h>

#include <cmath>

#include <c10/core/GradMode.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/capture.h"
#include "comm/join.h"
#include "optim/gradient_clipping.h"
#include "optim/optimizer_state.h"
#include "optim/zero_redundancy_shard.h"

namespace lockstep {

ZeroRedundancyOptimizerBase::ZeroRedundancyOptimizerBase(std::vector<torch::optim::OptimizerParamGroup> groups,
                                                         std::vector<std::string> names,
                                                         std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                                         ProcessGroup group, const ZeroRedundancyOptions& options,
                                                         ShardBy shard_by, const Make& make,
                                                         void (*before_replay)(torch::optim::Optimizer&))
    : Optimizer(std::move(groups), std::move(defaults)),
      before_step_(options.before_step),
      shard_(
          std::make_shared<Shard>(*this, std::move(names), std::move(group), shard_by, options, make, before_replay)) {}

ZeroRedundancyOptimizerBase::~ZeroRedundancyOptimizerBase() {
  shard_->release();
}

at::Tensor ZeroRedundancyOptimizerBase::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode enabled(true);
    loss = closure();
  }
  step_shard({});
  return loss;
}

void ZeroRedundancyOptimizerBase::step_unless(const at::Tensor& skip) {
  if (join_)
    throw UsageError(
        shard_->group().rank(),
        "ZeroRedundancyOptimizer: a GradScaler cannot be used in a join, because a rank without inputs would "
        "step with scaled gradients; use bfloat16, which needs no scaler");
  step_shard(skip);
}

void ZeroRedundancyOptimizerBase::step_shard(const at::Tensor& skip) {
  const c10::NoGradGuard no_grad;
  if (shard_->updates_in_backward() && !shard_->holds_updates()) {
    if (skip.defined())
      throw UsageError(shard_->group().rank(),
                       "ZeroRedundancyOptimizer: a GradScaler cannot be used with update_in_backward, because the "
                       "parameters are updated before it has looked at all gradients; set the option hold_updates, or "
                       "leave update_in_backward out");
    return shard_->end_step_in_backward();
  }
  if (shard_->updates_in_backward()) shard_->check_can_step();
  shard_->take_writes();
  if (join_) shard_->do_as(join_->round().last_rank());
  if (before_step_) before_step_();
  if (detail::is_capturing(shard_->group().device()))
    detail::Recording::before_replay([shard = shard_] { shard->take_options(); });
  shard_->step(skip);
}

std::shared_ptr<BucketUpdate> ZeroRedundancyOptimizerBase::bucket_update() const {
  if (before_step_)
    throw UsageError(shard_->group().rank(),
                     "ZeroRedundancyOptimizer: the option before_step cannot be combined with bucket_update(): the "
                     "parameters are updated before step() is called");
  return shard_;
}

at::Tensor ZeroRedundancyOptimizerBase::clip_grad_norm(double max_norm, const ClipGradNormOptions& options) {
  const auto gradients = held_gradients();
  if (!gradients)
    throw UsageError(shard_->group().rank(),
                     "ZeroRedundancyOptimizer::clip_grad_norm: the optimizer holds no gradients; construct it with "
                     "hold_updates and use update_in_backward, or call clip_grad_norm_(ddp.parameters(), max_norm)");
  if (!(options.norm_type > 0))
    throw UsageError(shard_->group().rank(), text("ZeroRedundancyOptimizer::clip_grad_norm: norm_type is ",
                                                  options.norm_type, ", expected a positive number"));
  return detail::clip_gradients(*gradients, max_norm, options, [this](const at::Tensor& norm, double norm_type) {
    auto total = norm.to(shard_->group().device(), at::kDouble);
    if (std::isinf(norm_type)) {
      shard_->group().all_reduce(total, ReduceOp::kMax, detail::kInStep);
    } else {
      total = total.pow(norm_type);
      shard_->group().all_reduce(total, ReduceOp::kSum, detail::kInStep);
      total = total.pow(1 / norm_type);
    }
    return shard_->has_doubles() ? total : total.to(at::kFloat);
  });
}

std::optional<std::vector<at::Tensor>> ZeroRedundancyOptimizerBase::held_gradients() const {
  if (!shard_->updates_in_backward() || !shard_->holds_updates()) return std::nullopt;
  return shard_->held_gradients();
}

void ZeroRedundancyOptimizerBase::take_maximum(const at::Tensor& number) const {
  shard_->group().all_reduce(number, ReduceOp::kMax, detail::kInStep);
}

bool ZeroRedundancyOptimizerBase::undo_step() {
  return shard_->undo_step();
}

OptimizerState ZeroRedundancyOptimizerBase::consolidated_state_dict(int dst) const {
  return shard_->consolidate(dst);
}

void ZeroRedundancyOptimizerBase::load_state_dict(const OptimizerState& state) {
  shard_->load(state);
}

Value ZeroRedundancyOptimizerBase::state_dict() const {
  return to_value(shard_->consolidate(0));
}

void ZeroRedundancyOptimizerBase::load_state_dict(const Value& value) {
  shard_->load(to_optimizer_state(value));
}

Value ZeroRedundancyOptimizerBase::shard_state_dict() const {
  return shard_->save_shard();
}

void ZeroRedundancyOptimizerBase::load_shards(size_t shards, const ReadShard& read) {
  shard_->load_shards(shards, read);
}

void ZeroRedundancyOptimizerBase::save(torch::serialize::OutputArchive&) const {
  throw UsageError(
      "ZeroRedundancyOptimizer: this rank has only a share of the state; call consolidated_state_dict() on all ranks");
}

void ZeroRedundancyOptimizerBase::load(torch::serialize::InputArchive&) {
  throw UsageError(
      "ZeroRedundancyOptimizer: load() is not supported; call load_state_dict() with the consolidated state");
}

int64_t ZeroRedundancyOptimizerBase::state_bytes() const {
  return detail::state_bytes(shard_->inner());
}

void ZeroRedundancyOptimizerBase::before_replay() {
  shard_->before_replay();
}

ProcessGroup ZeroRedundancyOptimizerBase::join_group() const {
  return shard_->group();
}

void ZeroRedundancyOptimizerBase::enter_join(std::shared_ptr<detail::JoinContext> context, bool is_first) {
  if (is_first)
    throw UsageError(shard_->group().rank(),
                     "join: the optimizer is listed before the wrapper; call join({&ddp, &optimizer}, ...)");
  join_ = std::move(context);
}

// A rank without inputs must step as well: the other ranks wait for its share of the parameters.
void ZeroRedundancyOptimizerBase::shadow(const detail::JoinRound& round) {
  if (round.is_synchronized) step();
}

void ZeroRedundancyOptimizerBase::copy_state_from(int) {}

void ZeroRedundancyOptimizerBase::leave_join() noexcept {
  join_.reset();
}

}  // namespace lockstep
