#include "optim/zero/update_of_shared_parameters.h"

#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep::detail {

std::vector<BucketUpdate::Layout> UpdateOfSharedParameters::prepare_buckets(const Plan&) {
  if (const auto why = ElementUpdate::refusal(shard().inner()); !why.empty())
    throw UsageError(shard().rank(),
                     text("ZeroRedundancyOptimizer: share_parameters with Overlap::kUpdate: ", why,
                          "; use ZeroRedundancyOptimizer<FusedAdamW>, or leave one of the options out"));
  inner_ = shard().inner_parameters();
  for (const auto& group : shard().inner().param_groups())
    states_of_parameter_ = std::max(states_of_parameter_, ElementUpdate::states(group.options()));
  for (const auto& [members, memory] : parameters().memories())
    states_.emplace_back(shard().group(), memory, states_of_parameter_);
  pieces_of_.resize(parameters().size());
  for (size_t i = 0; i < parameters().pieces().size(); ++i)
    pieces_of_[parameters().pieces()[i].overall.parameter].push_back(i);
  note_places();
  return {};
}

void UpdateOfSharedParameters::note_places() {
  places_.clear();
  for (const auto& piece : parameters().pieces()) places_.push_back(states_[piece.memory].of(piece.in_memory));
}

void UpdateOfSharedParameters::keep_undo() {
  keeps_undo_ = true;
  for (auto& state : states_) state.keep_copies(shard().group());
  note_places();
}

BucketUpdate::Started UpdateOfSharedParameters::update(const Bucket& bucket) {
  const c10::NoGradGuard no_grad;
  const auto work = reduce_ranges_async(shard().group(), begin_update(bucket), kInBackward);
  pending_.push_back(work);
  return {work, [work] { work.wait(); }};
}

void UpdateOfSharedParameters::update_and_finish(const Bucket& bucket) {
  const c10::NoGradGuard no_grad;
  reduce_ranges(shard().group(), begin_update(bucket), kInBackward);
}

/// Counts the step of the bucket's parameters. The update itself is in the returned reduction.
RangeReduction UpdateOfSharedParameters::begin_update(const Bucket& bucket) {
  check_optimizer_exists();
  if (!shard().is_incomplete()) begin_shared_step();
  const auto offset_of = [&](const at::Tensor& part) {
    const auto bytes = static_cast<const char*>(part.data_ptr()) - static_cast<const char*>(bucket.buffer.data_ptr());
    return bytes / static_cast<int64_t>(bucket.buffer.element_size());
  };
  auto started = std::make_shared<std::vector<ElementUpdate>>();
  RangeReduction reduction{bucket.buffer, ReduceOp::kAvg, {}, {}, std::exchange(note_of_writes_, "")};
  for (size_t i = 0; i < bucket.parameters.size(); ++i) {
    const auto& parameter = bucket.parameters[i];
    note_update(parameter);
    for (size_t index : pieces_of_[index_of(parameter)]) {
      const auto& piece = parameters().pieces()[index];
      started->emplace_back(shard().inner(), shard().options_of(piece), inner_[index], places_[index], steps_);
      reduction.ranges.push_back({offset_of(bucket.gradients[i]) + piece.in_memory.begin, piece.in_memory.size});
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
  started_.push_back(std::move(started));
  return reduction;
}

// Ranks that have written to different parameters detect it when they compare the first call of this step.
void UpdateOfSharedParameters::begin_shared_step() {
  if (const auto written = parameters().written(); !written.empty()) {
    std::vector<std::string> names;
    for (size_t parameter : written) names.push_back(parameters().name_of(parameter));
    note_of_writes_ = text("after writing to ", enumerate(names), ", which all ranks share");
  }
  begin_step_in_backward();
  for (const auto& group : shard().inner().param_groups())
    if (ElementUpdate::states(group.options()) > states_of_parameter_)
      throw UsageError(shard().rank(),
                       "momentum or amsgrad was switched on after the ZeroRedundancyOptimizer was constructed, but the "
                       "memory for the state is in use; set these options when the optimizer is constructed");
  ++steps_;
}

void UpdateOfSharedParameters::step(const at::Tensor& skip) {
  end_step_in_backward(skip);
}

void UpdateOfSharedParameters::forget_step() {
  started_.clear();
  pending_.clear();
}

bool UpdateOfSharedParameters::undo_step() {
  if (!keeps_undo_)
    throw UsageError(shard().rank(),
                     "undo_step: there are no copies to restore; call keep_copies() before the first step");
  if (!shard().is_incomplete()) return false;
  for (const auto& work : pending_) {
    try {
      work.wait();
    } catch (const Error&) {
      // the step is undone because of such an error
    }
  }
  for (const auto& state : states_) state.restore(steps_);
  for (const auto& started : started_)
    for (const auto& update : *started) update.undo_step_count();
  for (size_t i = 0; i < parameters().size(); ++i) parameters().tensor(i).unsafeGetTensorImpl()->bump_version();
  parameters().note_values();
  end_step();
  return true;
}

}  // namespace lockstep::detail
