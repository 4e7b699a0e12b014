// Parameters that all ranks share, and their updates during backward.

#include <algorithm>
#include <cstring>
#include <set>

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/shared_memory_calls.h"
#include "optim/element_update.h"
#include "optim/zero_redundancy_shard.h"

namespace lockstep {
namespace {

using detail::kInConstructor;
using detail::kInStep;

// A bucket of gradients should contain parts of all ranks' shares, so that all ranks work on its update.
constexpr int64_t kSegmentBytes = 1 << 20;

const CallOptions kInBackward{.site = {"backward of DistributedDataParallel, update_in_backward", 0}};
const CallOptions kInCheck{.site = {"update_in_backward", 0}};

}  // namespace

void ZeroRedundancyOptimizerBase::Shard::check_can_share() const {
  if (!group_.device().is_cpu())
    throw UsageError(group_.rank(), text("ZeroRedundancyOptimizer: share_parameters is for parameters on the CPU, but "
                                         "the group's device is ",
                                         group_.device(), "; leave share_parameters out"));
  if (!detail::shares_memory(group_))
    throw UsageError(group_.rank(), text("ZeroRedundancyOptimizer: share_parameters needs ranks that share memory, but "
                                         "group ",
                                         group_.name(), " uses backend ", group_.backend_name(),
                                         "; pass a group of the ranks of one host with backend 'shm', as "
                                         "split_group() makes it"));
}

/// Cuts parameters of one dtype into lists, each of which is divided between all ranks.
std::vector<std::vector<size_t>> ZeroRedundancyOptimizerBase::Shard::segments(const std::vector<size_t>& members,
                                                                              ShardBy by) const {
  if (buffer_ == Buffer::kOwn || by == ShardBy::kParameters) return {members};
  std::vector<std::vector<size_t>> result;
  int64_t bytes = kSegmentBytes;
  for (size_t parameter : members) {
    if (bytes >= kSegmentBytes) {
      result.emplace_back();
      bytes = 0;
    }
    result.back().push_back(parameter);
    bytes += static_cast<int64_t>(parameters_[parameter].nbytes());
  }
  return result;
}

/// Throws MismatchError on all ranks unless the parameters of all ranks are equal. Collective.
void ZeroRedundancyOptimizerBase::Shard::check_equal_values() const {
  group_.barrier(kInConstructor);  // rank 0 has written its values
  std::string mine;
  for (const auto& memory : memories_)
    if (const auto first = memory.memory.first_difference(); first && mine.empty())
      mine = name_of(memory.members[*first]);
  const auto all = group_.all_gather_object(mine, kInConstructor);
  for (int rank = 0; rank < group_.size(); ++rank)
    if (const auto& theirs = all[rank].toStringRef(); !theirs.empty())
      throw MismatchError(group_.rank(), text("ZeroRedundancyOptimizer: share_parameters needs equal parameters on all "
                                              "ranks, but ",
                                              theirs, " of rank ", rank,
                                              " differs from rank 0's; wrap "
                                              "the model in DistributedDataParallel first, which copies rank 0's"));
}

/// `written` lists the parameters that this rank has written to since the last step. Throws MismatchError on all ranks
/// if the lists differ. When it returns, all ranks are done with the old values. Collective.
void ZeroRedundancyOptimizerBase::Shard::agree_on_writes(const std::vector<size_t>& written) const {
  auto somewhere = at::full({1}, static_cast<int64_t>(written.size()), at::kLong);
  group_.all_reduce(somewhere, ReduceOp::kMax, kInStep);
  if (somewhere.item<int64_t>() == 0) return;
  std::vector<c10::IValue> mine;
  for (size_t parameter : written) mine.emplace_back(static_cast<int64_t>(parameter));
  const auto all = group_.all_gather_object(c10::ivalue::Tuple::create(std::move(mine)), kInStep);
  std::vector<std::set<int64_t>> writes(all.size());
  for (size_t rank = 0; rank < all.size(); ++rank)
    for (const auto& parameter : all[rank].toTupleRef().elements()) writes[rank].insert(parameter.toInt());
  for (size_t rank = 0; rank < writes.size(); ++rank)
    for (int64_t parameter : writes[rank])
      for (size_t other = 0; other < writes.size(); ++other)
        if (!writes[other].contains(parameter))
          throw MismatchError(
              group_.rank(),
              text("rank ", rank, " wrote to ", name_of(static_cast<size_t>(parameter)),
                   " since the last step, and rank ", other,
                   " did not, but all ranks share the parameters "
                   "(share_parameters); only step() may change them, except for loading the same values on every "
                   "rank"));
}

// --- updates in backward

void ZeroRedundancyOptimizerBase::Shard::check(const ProcessGroup& group,
                                               const std::vector<std::pair<std::string, at::Tensor>>& parameters) {
  const auto refuse = [&](auto&&... why) { throw UsageError(group_.rank(), text("update_in_backward: ", why...)); };
  if (buffer_ == Buffer::kOwn)
    refuse("the optimizer does not share its parameters; construct it with share_parameters");
  if (!(group == group_))
    refuse("the wrapper uses group ", group.name(), " and the optimizer ", group_.name(), "; use one group for both");
  if (const auto why = detail::ElementUpdate::refusal(*inner_); !why.empty())
    refuse(why, "; use ZeroRedundancyOptimizer<FusedAdamW>, or leave update_in_backward out");
  if (updates_) refuse("the optimizer is used by another wrapper already");
  auto updates = std::make_unique<Updates>();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    updates->index_of[parameters_[i].unsafeGetTensorImpl()] = i;
    if (!at::isFloatingType(parameters_[i].scalar_type()))
      refuse(name_of(i), " has dtype ", parameters_[i].scalar_type(), ", expected a floating-point one");
  }
  for (const auto& [name, parameter] : parameters)
    if (!updates->index_of.contains(parameter.unsafeGetTensorImpl()))
      refuse("parameter '", name, "' of the wrapper is not a parameter of the optimizer; pass ddp.named_parameters()");

  updates->shares_of.resize(parameters_.size());
  for (size_t i = 0; i < shares_.size(); ++i) updates->shares_of[shares_[i].overall.parameter].push_back(i);
  updates->updated.assign(parameters_.size(), 0);
  for (const auto& options : inner_->param_groups()) {
    updates->parameters.insert(updates->parameters.end(), options.params().begin(), options.params().end());
    updates->states_of_parameter =
        std::max(updates->states_of_parameter, detail::ElementUpdate::states(options.options()));
  }
  using Undo = detail::SharedState::Undo;
  for (const auto& [members, memory] : memories_)
    updates->states.emplace_back(group_, memory, updates->states_of_parameter,
                                 keeps_undo_ ? Undo::kPossible : Undo::kNone);
  for (const auto& share : shares_) updates->places.push_back(updates->states[share.memory].of(share.here));
  updates_ = std::move(updates);
}

void ZeroRedundancyOptimizerBase::Shard::begin_step_in_backward() {
  if (!outer_)
    throw UsageError(group_.rank(),
                     "update_in_backward: the optimizer was destroyed; keep it as long as the wrapper runs backward");
  if (const auto written = written_parameters(); !written.empty()) {
    std::vector<std::string> names;
    for (size_t parameter : written) names.push_back(name_of(parameter));
    updates_->note_of_writes = text("after writing to ", enumerate(names), ", which all ranks share");
  }
  check_unchanged();
  written_ = versions();
  take_options();
  for (const auto& options : inner_->param_groups())
    if (detail::ElementUpdate::states(options.options()) > updates_->states_of_parameter)
      throw UsageError(group_.rank(),
                       "momentum or amsgrad was switched on after update_in_backward, which reserves memory for the "
                       "state; set these options when the optimizer is constructed");
  step_incomplete_ = true;
  ++updates_->steps;
}

/// Counts the step of the bucket's parameters. The update itself is in the returned reduction.
detail::RangeReduction ZeroRedundancyOptimizerBase::Shard::begin_update(const Bucket& bucket) {
  const c10::NoGradGuard no_grad;
  if (!step_incomplete_) begin_step_in_backward();
  const auto offset_of = [&](const at::Tensor& part) {
    const auto bytes = static_cast<const char*>(part.data_ptr()) - static_cast<const char*>(bucket.buffer.data_ptr());
    return bytes / static_cast<int64_t>(bucket.buffer.element_size());
  };
  auto started = std::make_shared<std::vector<detail::ElementUpdate>>();
  detail::RangeReduction reduction{bucket.buffer, ReduceOp::kAvg, {}, {}, std::exchange(updates_->note_of_writes, "")};
  for (size_t i = 0; i < bucket.parameters.size(); ++i) {
    const auto& tensor = bucket.parameters[i];
    const size_t parameter = updates_->index_of.at(tensor.unsafeGetTensorImpl());
    if (std::exchange(updates_->updated[parameter], 1))
      throw UsageError(group_.rank(), text(name_of(parameter),
                                           " was updated in an earlier backward already; call step() after each "
                                           "backward, and run all but the last backward of an accumulation under "
                                           "no_sync()"));
    for (size_t index : updates_->shares_of[parameter]) {
      const auto& share = shares_[index];
      started->emplace_back(*inner_, inner_->param_groups()[share.group].options(), updates_->parameters[index],
                            updates_->places[index], updates_->steps);
      reduction.ranges.push_back({offset_of(bucket.gradients[i]) + share.here.begin, share.here.size});
    }
    tensor.unsafeGetTensorImpl()->bump_version();
    written_[parameter] = {static_cast<uint64_t>(tensor._version()), tensor.data_ptr()};
  }
  if (bucket.extra.defined()) reduction.ranges.push_back({offset_of(bucket.extra), bucket.extra.numel()});
  reduction.consume = [started, extra = bucket.averaged_extra](size_t range, int64_t begin, int64_t count,
                                                               const void* values) {
    if (range < started->size())
      (*started)[range].apply(begin, count, values);
    else
      std::memcpy(extra.narrow(0, begin, count).data_ptr(), values, static_cast<size_t>(count) * extra.element_size());
  };
  updates_->started.push_back(std::move(started));
  return reduction;
}

Work ZeroRedundancyOptimizerBase::Shard::update(const Bucket& bucket) {
  updates_->pending.push_back(detail::reduce_ranges_async(group_, begin_update(bucket), kInBackward));
  return updates_->pending.back();
}

void ZeroRedundancyOptimizerBase::Shard::update_and_wait(const Bucket& bucket) {
  detail::reduce_ranges(group_, begin_update(bucket), kInBackward);
}

void ZeroRedundancyOptimizerBase::Shard::end_step_in_backward() {
  std::fill(updates_->updated.begin(), updates_->updated.end(), 0);
  updates_->started.clear();
  updates_->pending.clear();
  step_incomplete_ = false;
}

bool ZeroRedundancyOptimizerBase::Shard::undo_step() {
  if (!updates_ || !keeps_undo_)
    throw UsageError(group_.rank(),
                     "undo_step: the optimizer keeps no copy; construct it with the option undo, and use "
                     "update_in_backward");
  if (!step_incomplete_) return false;
  for (const auto& work : updates_->pending) {
    try {
      work.wait();
    } catch (const Error&) {
      // the step is undone because of such an error
    }
  }
  for (const auto& state : updates_->states) state.restore(updates_->steps);
  for (const auto& started : updates_->started)
    for (const auto& update : *started) update.take_back_count();
  for (const auto& parameter : parameters_) parameter.unsafeGetTensorImpl()->bump_version();
  written_ = versions();
  end_step_in_backward();
  return true;
}

}  // namespace lockstep
