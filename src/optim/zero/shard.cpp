#include "optim/zero/shard.h"

#include <lockstep/error.h>
#include <lockstep/fused_optimizers.h>

#include "base/text.h"
#include "comm/capture.h"

namespace lockstep::detail {
namespace {

std::vector<ShardedParameters::Parameter> parameters_of(const torch::optim::Optimizer& optimizer) {
  std::vector<ShardedParameters::Parameter> result;
  for (size_t g = 0; g < optimizer.param_groups().size(); ++g)
    for (const auto& parameter : optimizer.param_groups()[g].params()) result.push_back({parameter, g});
  return result;
}

}  // namespace

Shard::Shard(torch::optim::Optimizer& outer, std::vector<std::string> names, ProcessGroup group, ShardBy by,
             ShardedParameters::Buffer buffer, InnerOptimizer inner)
    : outer_(&outer),
      make_(std::move(inner)),
      parameters_(std::move(group), parameters_of(outer), std::move(names), by, buffer) {
  make_inner();
}

void Shard::divide(const std::vector<std::vector<size_t>>& lists) {
  parameters_.divide(lists);
  make_inner();
}

void Shard::make_inner() {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (size_t g = 0; g < outer_->param_groups().size(); ++g) {
    std::vector<at::Tensor> values;
    for (const auto& piece : parameters_.pieces())
      if (parameters_.group_of(piece.overall.parameter) == g) values.push_back(parameters_.values(piece));
    groups.emplace_back(std::move(values), outer_->param_groups()[g].options().clone());
  }
  inner_ = make_.make(std::move(groups));
}

std::vector<at::Tensor> Shard::inner_parameters() const {
  std::vector<at::Tensor> result;
  for (const auto& group : inner_->param_groups())
    result.insert(result.end(), group.params().begin(), group.params().end());
  return result;
}

const torch::optim::OptimizerOptions& Shard::options_of(const ShardedParameters::Piece& piece) const {
  return inner_->param_groups()[parameters_.group_of(piece.overall.parameter)].options();
}

void Shard::copy_options() const {
  if (!outer_)
    throw UsageError(
        "the captured step cannot be replayed: its ZeroRedundancyOptimizer was destroyed; create a new CapturedStep");
  for (size_t g = 0; g < inner_->param_groups().size(); ++g)
    inner_->param_groups()[g].set_options(outer_->param_groups()[g].options().clone());
}

void Shard::before_replay() const {
  copy_options();
  make_.before_replay(*inner_);
}

void Shard::accept_writes() {
  const auto written = parameters_.written();
  if (parameters_.are_shared()) parameters_.agree_on_writes(written);
  note_writes();
  restore_parameters();
  // A rank that copies values into the shared memory late would overwrite updates of the other ranks. In most steps
  // nothing was written: all ranks know that, because their lists are equal, and do not wait.
  if (parameters_.are_shared() && !written.empty()) group().barrier(kInStep);
}

void Shard::note_writes() const {
  if (parameters_.written().empty()) return;
  for (const auto& values : inner_parameters()) values.unsafeGetTensorImpl()->bump_version();
}

void Shard::restore_parameters() const {
  size_t count = 0;
  for (const auto& group : outer_->param_groups()) count += group.params().size();
  if (count != parameters_.size())
    throw UsageError(rank(), text("ZeroRedundancyOptimizer was constructed with ", parameters_.size(),
                                  " parameters and has ", count, " now; pass all groups to its constructor"));
  parameters_.restore_memory();
}

void Shard::prepare_step() {
  if (is_capturing(group().device())) Recording::before_replay([shard = shared_from_this()] { shard->copy_options(); });
  copy_options();
}

void Shard::step(const at::Tensor& skip, size_t memories) {
  is_incomplete_ = !is_capturing(group().device());
  if (!skip.defined())
    inner_->step();
  else if (auto* skippable = dynamic_cast<SkippableStep*>(inner_.get()))
    skippable->step_unless(skip);
  else if (skip.item<float>() == 0)
    inner_->step();
  for (const auto& values : inner_parameters())
    values.mutable_grad().reset();  // zero_grad() can then free the gradients
  parameters_.publish_updates(memories);
  for (size_t i = 0; i < parameters_.size(); ++i) parameters_.tensor(i).unsafeGetTensorImpl()->bump_version();
  parameters_.note_values();
  is_incomplete_ = false;
}

void Shard::check_complete() const {
  if (is_incomplete_)
    throw UsageError(rank(),
                     "ZeroRedundancyOptimizer: the last step did not finish, so the ranks' shares may be of "
                     "different steps; resume from the last checkpoint");
}

}  // namespace lockstep::detail
