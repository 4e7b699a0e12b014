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

using detail::kInBackward;
using detail::kInConstructor;
using detail::kInStep;

// A bucket of gradients should contain parts of all ranks' shares, so that all ranks work on its update.
constexpr int64_t kSegmentBytes = 1 << 20;

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
std::vector<std::vector<size_t>> ZeroRedundancyOptimizerBase::Shard::segments(
    const std::vector<size_t>& members) const {
  if (buffer_ == Buffer::kOwn || by_ == ShardBy::kParameters) return {members};
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

void ZeroRedundancyOptimizerBase::Shard::prepare_shared() {
  if (const auto why = detail::ElementUpdate::refusal(*inner_); !why.empty())
    throw UsageError(group_.rank(), text("update_in_backward: ", why,
                                         "; use ZeroRedundancyOptimizer<FusedAdamW>, or leave share_parameters or "
                                         "update_in_backward out"));
  auto updates = std::make_unique<SharedUpdates>();
  updates->shares_of.resize(parameters_.size());
  for (size_t i = 0; i < shares_.size(); ++i) updates->shares_of[shares_[i].overall.parameter].push_back(i);
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
  shared_updates_ = std::move(updates);
}

void ZeroRedundancyOptimizerBase::Shard::begin_shared_step() {
  if (const auto written = written_parameters(); !written.empty()) {
    std::vector<std::string> names;
    for (size_t parameter : written) names.push_back(name_of(parameter));
    shared_updates_->note_of_writes = text("after writing to ", enumerate(names), ", which all ranks share");
  }
  begin_step_in_backward();
  for (const auto& options : inner_->param_groups())
    if (detail::ElementUpdate::states(options.options()) > shared_updates_->states_of_parameter)
      throw UsageError(group_.rank(),
                       "momentum or amsgrad was switched on after update_in_backward, which reserves memory for the "
                       "state; set these options when the optimizer is constructed");
  ++shared_updates_->steps;
}

/// Counts the step of the bucket's parameters. The update itself is in the returned reduction.
detail::RangeReduction ZeroRedundancyOptimizerBase::Shard::begin_shared_update(const Bucket& bucket) {
  if (!step_incomplete_) begin_shared_step();
  auto& updates = *shared_updates_;
  const auto offset_of = [&](const at::Tensor& part) {
    const auto bytes = static_cast<const char*>(part.data_ptr()) - static_cast<const char*>(bucket.buffer.data_ptr());
    return bytes / static_cast<int64_t>(bucket.buffer.element_size());
  };
  auto started = std::make_shared<std::vector<detail::ElementUpdate>>();
  detail::RangeReduction reduction{bucket.buffer, ReduceOp::kAvg, {}, {}, std::exchange(updates.note_of_writes, "")};
  for (size_t i = 0; i < bucket.parameters.size(); ++i) {
    const auto& tensor = bucket.parameters[i];
    note_update(tensor);
    for (size_t index : updates.shares_of[index_of_.at(tensor.unsafeGetTensorImpl())]) {
      const auto& share = shares_[index];
      started->emplace_back(*inner_, inner_->param_groups()[share.group].options(), updates.parameters[index],
                            updates.places[index], updates.steps);
      reduction.ranges.push_back({offset_of(bucket.gradients[i]) + share.here.begin, share.here.size});
    }
  }
  if (bucket.extra.defined()) reduction.ranges.push_back({offset_of(bucket.extra), bucket.extra.numel()});
  reduction.consume = [started, extra = bucket.averaged_extra](size_t range, int64_t begin, int64_t count,
                                                               const void* values) {
    if (range < started->size())
      (*started)[range].apply(begin, count, values);
    else
      std::memcpy(extra.narrow(0, begin, count).data_ptr(), values, static_cast<size_t>(count) * extra.element_size());
  };
  updates.started.push_back(std::move(started));
  return reduction;
}

BucketUpdate::Started ZeroRedundancyOptimizerBase::Shard::start_shared_update(const Bucket& bucket) {
  const auto work = detail::reduce_ranges_async(group_, begin_shared_update(bucket), kInBackward);
  shared_updates_->pending.push_back(work);
  return {work, [work] { work.wait(); }};
}

void ZeroRedundancyOptimizerBase::Shard::finish_shared_update(const Bucket& bucket) {
  detail::reduce_ranges(group_, begin_shared_update(bucket), kInBackward);
}

bool ZeroRedundancyOptimizerBase::Shard::undo_step() {
  if (!shared_updates_ || !keeps_undo_)
    throw UsageError(group_.rank(),
                     "undo_step: the optimizer keeps no copy; construct it with the options share_parameters and undo, "
                     "and use update_in_backward");
  if (!step_incomplete_) return false;
  for (const auto& work : shared_updates_->pending) {
    try {
      work.wait();
    } catch (const Error&) {
      // the step is undone because of such an error
    }
  }
  for (const auto& state : shared_updates_->states) state.restore(shared_updates_->steps);
  for (const auto& started : shared_updates_->started)
    for (const auto& update : *started) update.take_back_count();
  for (const auto& parameter : parameters_) parameter.unsafeGetTensorImpl()->bump_version();
  written_ = versions();
  end_step_in_backward();
  return true;
}

}  // namespace lockstep
