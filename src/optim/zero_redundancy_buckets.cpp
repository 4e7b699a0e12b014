// Updates during backward, bucket by bucket.

#include <algorithm>
#include <map>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/run_and_agree.h"
#include "comm/capture.h"
#include "optim/zero_redundancy_shard.h"

namespace lockstep {

using detail::kInBackward;

// --- of all parameters

void ZeroRedundancyOptimizerBase::Shard::check_plan(const ProcessGroup& group, const Plan& plan) {
  const auto refuse = [&](auto&&... why) { throw UsageError(group_.rank(), text("update_in_backward: ", why...)); };
  if (!(group == group_))
    refuse("the wrapper uses group ", group.name(), " and the optimizer ", group_.name(), "; use one group for both");
  if (updates_in_backward()) refuse("the optimizer is used by another wrapper already");
  detail::run_and_agree(group_, [&] {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      index_of_[parameters_[i].unsafeGetTensorImpl()] = i;
      if (!at::isFloatingType(parameters_[i].scalar_type()))
        refuse(name_of(i), " has dtype ", parameters_[i].scalar_type(), ", expected a floating-point one");
    }
    std::vector<char> is_reduced(parameters_.size());
    for (const auto& [name, parameter] : plan.parameters) {
      const auto found = index_of_.find(parameter.unsafeGetTensorImpl());
      if (found == index_of_.end())
        refuse("parameter '", name,
               "' of the wrapper is not a parameter of the optimizer; pass ddp.named_parameters()");
      is_reduced[found->second] = 1;
    }
    not_reduced_.clear();
    for (size_t i = 0; i < parameters_.size(); ++i)
      if (!is_reduced[i]) not_reduced_.push_back(i);
    check_not_reduced();
  });
}

/// Backward would never update these parameters, so they must be frozen.
void ZeroRedundancyOptimizerBase::Shard::check_not_reduced() const {
  for (size_t i : not_reduced_)
    if (parameters_[i].requires_grad())
      throw UsageError(group_.rank(),
                       text("update_in_backward: ", name_of(i),
                            " of the optimizer would never be updated, because the wrapper does not reduce its "
                            "gradient: the parameter is not in the wrapped model, or in the wrapper's option ignore; "
                            "give it an optimizer of its own, or freeze it with requires_grad_(false)"));
}

std::vector<BucketUpdate::Layout> ZeroRedundancyOptimizerBase::Shard::prepare(const ProcessGroup& group,
                                                                              const Plan& plan) {
  check_plan(group, plan);
  if (holds_updates_ && buffer_ == Buffer::kShared)
    throw UsageError(group_.rank(),
                     "update_in_backward: the option hold_updates cannot be combined with share_parameters; leave "
                     "update_in_backward out, and step() updates the shared parameters");
  updated_.assign(parameters_.size(), 0);
  if (buffer_ == Buffer::kOwn) return prepare_buckets(plan);
  prepare_shared();
  return {};
}

BucketUpdate::Started ZeroRedundancyOptimizerBase::Shard::update(const Bucket& bucket) {
  const c10::NoGradGuard no_grad;
  if (shared_updates_) return start_shared_update(bucket);
  if (bucket_updates_->alone.empty()) return start_bucket(bucket);
  update_alone(bucket);
  return {std::nullopt, [] {}};
}

void ZeroRedundancyOptimizerBase::Shard::update_and_finish(const Bucket& bucket) {
  const c10::NoGradGuard no_grad;
  if (shared_updates_)
    finish_shared_update(bucket);
  else if (bucket_updates_->alone.empty())
    finish_last_bucket(bucket);
  else
    update_alone(bucket);
}

void ZeroRedundancyOptimizerBase::Shard::begin_step_in_backward() {
  if (!outer_)
    throw UsageError(group_.rank(),
                     "update_in_backward: the optimizer was destroyed; keep it as long as the wrapper runs backward");
  check_unchanged();
  written_ = versions();
  take_options();
  step_incomplete_ = true;
}

void ZeroRedundancyOptimizerBase::Shard::note_gradient(const at::Tensor& parameter) {
  const size_t index = index_of_.at(parameter.unsafeGetTensorImpl());
  if (std::exchange(updated_[index], 1))
    throw UsageError(
        group_.rank(),
        text(name_of(index), holds_updates_ ? " has an averaged gradient of" : " was updated in",
             " an earlier backward already; call step() after each backward, and run all but the last backward of an "
             "accumulation under no_sync()"));
}

/// Tells autograd, and written_parameters(), that the parameter changes.
void ZeroRedundancyOptimizerBase::Shard::note_update(const at::Tensor& parameter) {
  note_gradient(parameter);
  const size_t index = index_of_.at(parameter.unsafeGetTensorImpl());
  parameter.unsafeGetTensorImpl()->bump_version();
  written_[index] = version_of(index);
}

void ZeroRedundancyOptimizerBase::Shard::check_can_step() const {
  check_not_reduced();
  if (bucket_updates_ && bucket_updates_->unfinished > 0)
    throw UsageError(group_.rank(), text("step() was called after a backward that did not finish, so ",
                                         holds_updates_ ? "gradients of some parameters are missing"
                                                        : "some parameters are updated and others are not",
                                         "; construct the wrapper and the optimizer anew, and load a checkpoint"));
  if (std::find(updated_.begin(), updated_.end(), 1) == updated_.end())
    throw UsageError(group_.rank(),
                     "step() was called without a backward since the last step; with update_in_backward call them in "
                     "turn, and capture both in one CapturedStep");
}

void ZeroRedundancyOptimizerBase::Shard::end_step_in_backward() {
  check_can_step();
  if (detail::is_capturing(group_.device()))  // backward runs on another thread, which does not record
    detail::Recording::before_replay([shard = shared_from_this()] { shard->before_replay(); });
  abandon();
}

void ZeroRedundancyOptimizerBase::Shard::abandon() {
  std::fill(updated_.begin(), updated_.end(), 0);
  if (shared_updates_) {
    shared_updates_->started.clear();
    shared_updates_->pending.clear();
  } else {
    bucket_updates_->waiting.reset();
    bucket_updates_->unfinished = 0;
  }
  step_incomplete_ = false;
}

// --- of parameters that are not shared

// Moves the parameters once more. The inner optimizer starts anew, so it must not have a state yet.
std::vector<BucketUpdate::Layout> ZeroRedundancyOptimizerBase::Shard::prepare_buckets(const Plan& plan) {
  if (keeps_undo_)
    throw UsageError(group_.rank(), "update_in_backward: the option undo needs the option share_parameters");
  detail::run_and_agree(group_, [&] {  // a rank without elements has no state
    if (!inner_->state().empty())
      throw UsageError(group_.rank(),
                       "update_in_backward: the optimizer has a state already; call update_in_backward before the "
                       "first step and before a state is loaded");
  });
  const c10::NoGradGuard no_grad;
  auto updates = std::make_unique<BucketUpdates>();
  if (group_.size() == 1 && !holds_updates_) {
    updates->alone.resize(parameters_.size());
    size_t next = 0;
    for (const auto& group : inner_->param_groups())
      for (const auto& values : group.params()) updates->alone[shares_[next++].overall.parameter] = values;
    bucket_updates_ = std::move(updates);
    return {};
  }
  memories_.clear();
  shares_.clear();
  std::vector<char> is_placed(parameters_.size());
  for (const auto& bucket : plan.buckets) {
    std::vector<size_t> members;
    for (size_t i : bucket) members.push_back(index_of_.at(plan.parameters[i].second.unsafeGetTensorImpl()));
    for (size_t i : members) is_placed[i] = 1;
    add_memory(members);
  }
  std::map<at::ScalarType, std::vector<size_t>> others;  // were frozen when the model was wrapped
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (!is_placed[i]) others[parameters_[i].scalar_type()].push_back(i);
  for (const auto& [dtype, members] : others) add_memory(members);
  use_memories();
  make_inner();

  if (group_.device().is_cuda())
    updates->stream = c10::impl::VirtualGuardImpl(group_.device().type()).getStreamFromGlobalPool(group_.device());
  std::vector<Layout> layouts;
  for (size_t b = 0; b < plan.buckets.size(); ++b) {
    const auto& memory = memories_[b].memory;
    updates->buckets.emplace_back().gradient = group_.allocate({memory.share_elements()}, memory.dtype()).zero_();
    layouts.push_back({memory.offsets(), memory.elements()});
  }
  size_t next = 0;
  for (const auto& group : inner_->param_groups())
    for (const auto& values : group.params()) {
      const auto& share = shares_[next++];
      if (share.memory >= updates->buckets.size()) continue;
      auto& bucket = updates->buckets[share.memory];
      bucket.pieces.push_back({values, memories_[share.memory].memory.values_in_share(share.here, bucket.gradient),
                               share.overall.parameter});
    }
  bucket_updates_ = std::move(updates);
  return layouts;
}

void ZeroRedundancyOptimizerBase::Shard::begin_bucket(const Bucket& bucket) {
  ++bucket_updates_->unfinished;
  if (bucket.extra.defined()) bucket.averaged_extra.copy_(bucket.extra);
  if (holds_updates_) {
    for (const auto& parameter : bucket.parameters) note_gradient(parameter);
    return;
  }
  if (!step_incomplete_) {
    note_writes();
    begin_step_in_backward();
  }
  for (const auto& parameter : bucket.parameters) note_update(parameter);
}

void ZeroRedundancyOptimizerBase::Shard::update_alone(const Bucket& bucket) {
  begin_bucket(bucket);
  std::vector<BucketUpdates::Piece> pieces;
  for (size_t i = 0; i < bucket.parameters.size(); ++i) {
    const size_t index = index_of_.at(bucket.parameters[i].unsafeGetTensorImpl());
    if (const auto& values = bucket_updates_->alone[index]; values.defined())  // has elements
      pieces.push_back({values, bucket.gradients[i], index});
  }
  step_pieces(pieces);
  --bucket_updates_->unfinished;
}

// On a CPU, the bucket before this one is updated now: it is probably reduced, so that the host does not wait for it.
// On a GPU the host never waits. All ranks make their calls in the same order.
BucketUpdate::Started ZeroRedundancyOptimizerBase::Shard::start_bucket(const Bucket& bucket) {
  begin_bucket(bucket);
  auto& own = bucket_updates_->buckets[bucket.index];
  own.reduced = memories_[bucket.index].memory.reduce_scatter_async(own.gradient, bucket.buffer, kInBackward);
  own.averaged_extra.reset();
  if (bucket.extra.defined())
    own.averaged_extra = group_.all_reduce_async(bucket.averaged_extra, ReduceOp::kAvg, kInBackward);
  if (holds_updates_) return {own.reduced, [this, index = bucket.index] { finish_bucket(index); }};
  update_waiting_bucket();
  bucket_updates_->waiting = bucket.index;
  if (bucket_updates_->stream) update_waiting_bucket();
  return {own.reduced, [this, index = bucket.index] { finish_bucket(index); }};
}

void ZeroRedundancyOptimizerBase::Shard::finish_last_bucket(const Bucket& bucket) {
  if (bucket_updates_->waiting || bucket_updates_->stream) return start_bucket(bucket).finish();
  begin_bucket(bucket);
  auto& own = bucket_updates_->buckets[bucket.index];
  const auto& memory = memories_[bucket.index].memory;
  memory.reduce_scatter(own.gradient, bucket.buffer, kInBackward);
  if (bucket.extra.defined()) group_.all_reduce(bucket.averaged_extra, ReduceOp::kAvg, kInBackward);
  if (!holds_updates_) {
    step_pieces(own.pieces);
    memory.gather(kInBackward);
  }
  --bucket_updates_->unfinished;
}

// On a GPU, the kernels of the update run beside those of backward.
void ZeroRedundancyOptimizerBase::Shard::update_waiting_bucket() {
  if (!bucket_updates_->waiting) return;
  const size_t index = *bucket_updates_->waiting;
  auto& own = bucket_updates_->buckets[index];
  c10::OptionalStreamGuard guard;
  if (const auto& stream = bucket_updates_->stream) {
    c10::Event now(stream->device_type());  // the capture of a CUDA graph continues on the stream
    now.record(c10::impl::VirtualGuardImpl(stream->device_type()).getStream(stream->device()));
    now.block(*stream);
    guard.reset_stream(*stream);
  }
  own.reduced->wait();
  step_pieces(own.pieces);
  own.gathered = memories_[index].memory.gather_async(kInBackward);
  bucket_updates_->waiting.reset();
}

/// Steps the inner optimizer with the gradients of one bucket only.
void ZeroRedundancyOptimizerBase::Shard::step_pieces(const std::vector<BucketUpdates::Piece>& pieces) {
  set_gradients(pieces);
  inner_->step();
  for (const auto& piece : pieces) piece.parameter.mutable_grad().reset();
}

void ZeroRedundancyOptimizerBase::Shard::set_gradients(const std::vector<BucketUpdates::Piece>& pieces) const {
  for (const auto& piece : pieces)
    piece.parameter.mutable_grad() = updated_[piece.index] ? piece.gradient : at::Tensor();
}

bool ZeroRedundancyOptimizerBase::Shard::has_doubles() const {
  const auto is_double = [](const at::Tensor& parameter) { return parameter.scalar_type() == at::kDouble; };
  return std::any_of(parameters_.begin(), parameters_.end(), is_double);
}

std::vector<at::Tensor> ZeroRedundancyOptimizerBase::Shard::held_gradients() const {
  std::vector<at::Tensor> gradients;
  for (const auto& bucket : bucket_updates_->buckets)
    for (const auto& piece : bucket.pieces)
      if (updated_[piece.index]) gradients.push_back(piece.gradient);
  return gradients;
}

void ZeroRedundancyOptimizerBase::Shard::finish_bucket(size_t index) {
  if (bucket_updates_->waiting == index) update_waiting_bucket();
  auto& own = bucket_updates_->buckets[index];
  holds_updates_ ? own.reduced->wait() : own.gathered->wait();
  if (own.averaged_extra) own.averaged_extra->wait();
  --bucket_updates_->unfinished;
}

}  // namespace lockstep
