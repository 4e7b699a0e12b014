#include "optim/zero/update_in_buckets.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep::detail {

std::vector<BucketUpdate::Layout> UpdateInBuckets::prepare_buckets(const Plan& plan) {
  const c10::NoGradGuard no_grad;
  const auto& group = shard().group();
  if (group.size() == 1 && !waits_for_step()) {
    alone_.resize(parameters().size());
    const auto inner = shard().inner_parameters();
    for (size_t i = 0; i < inner.size(); ++i) alone_[parameters().pieces()[i].overall.parameter] = inner[i];
    return {};
  }
  std::vector<std::vector<size_t>> lists;
  for (const auto& bucket : plan.buckets) {
    auto& members = lists.emplace_back();
    for (size_t i : bucket) members.push_back(index_of(plan.parameters[i].second));
  }
  shard().divide(lists);

  if (group.device().is_cuda())
    stream_ = c10::impl::VirtualGuardImpl(group.device().type()).getStreamFromGlobalPool(group.device());
  std::vector<Layout> layouts;
  for (size_t b = 0; b < lists.size(); ++b) {
    const auto& memory = memory_of(b);
    buckets_.push_back({group.allocate({memory.share_elements()}, memory.dtype()).zero_()});
    layouts.push_back({memory.offsets(), memory.elements()});
  }
  const auto inner = shard().inner_parameters();
  for (size_t i = 0; i < inner.size(); ++i) {
    const auto& piece = parameters().pieces()[i];
    if (piece.memory >= buckets_.size()) continue;  // of a parameter that was frozen when the model was wrapped
    auto& bucket = buckets_[piece.memory];
    bucket.pieces.push_back(
        {inner[i], memory_of(piece.memory).values_in_share(piece.here, bucket.gradient), piece.overall.parameter});
  }
  return layouts;
}

// --- in backward

BucketUpdate::Started UpdateInBuckets::update(const Bucket& bucket) {
  const c10::NoGradGuard no_grad;
  begin_bucket(bucket);
  if (!alone_.empty()) {
    update_alone(bucket);
    return {std::nullopt, [] {}};
  }
  auto& own = buckets_[bucket.index];
  own.reduced = memory_of(bucket.index).reduce_scatter_async(own.gradient, bucket.buffer, kInBackward);
  own.averaged_extra.reset();
  if (bucket.extra.defined())
    own.averaged_extra = shard().group().all_reduce_async(bucket.averaged_extra, ReduceOp::kAvg, kInBackward);
  if (!waits_for_step()) {
    update_waiting_bucket();  // all ranks make their calls in the same order
    waiting_ = bucket.index;
    if (stream_) update_waiting_bucket();
  }
  return {own.reduced, [this, index = bucket.index] { finish_bucket(index); }};
}

void UpdateInBuckets::update_and_finish(const Bucket& bucket) {
  if (!alone_.empty() || waiting_ || stream_) return update(bucket).finish();
  const c10::NoGradGuard no_grad;
  begin_bucket(bucket);
  auto& own = buckets_[bucket.index];
  const auto& memory = memory_of(bucket.index);
  memory.reduce_scatter(own.gradient, bucket.buffer, kInBackward);
  if (bucket.extra.defined()) shard().group().all_reduce(bucket.averaged_extra, ReduceOp::kAvg, kInBackward);
  if (!waits_for_step()) {
    step_pieces(own.pieces);
    memory.gather(kInBackward);
  }
  --unfinished_;
}

void UpdateInBuckets::begin_bucket(const Bucket& bucket) {
  check_optimizer_exists();
  ++unfinished_;
  if (bucket.extra.defined()) bucket.averaged_extra.copy_(bucket.extra);
  if (waits_for_step()) {
    for (const auto& parameter : bucket.parameters) note_gradient(parameter);
    return;
  }
  if (!shard().is_incomplete()) {
    shard().note_writes();
    begin_step_in_backward();
  }
  for (const auto& parameter : bucket.parameters) note_update(parameter);
}

/// On the only rank: steps the inner optimizer with the gradients of the bucket.
void UpdateInBuckets::update_alone(const Bucket& bucket) {
  std::vector<Piece> pieces;
  for (size_t i = 0; i < bucket.parameters.size(); ++i) {
    const size_t index = index_of(bucket.parameters[i]);
    if (alone_[index].defined()) pieces.push_back({alone_[index], bucket.gradients[i], index});  // has elements
  }
  step_pieces(pieces);
  --unfinished_;
}

void UpdateInBuckets::update_waiting_bucket() {
  if (!waiting_) return;
  const size_t index = *waiting_;
  auto& own = buckets_[index];
  c10::OptionalStreamGuard guard;
  if (stream_) {
    c10::Event now(stream_->device_type());  // the capture of a CUDA graph continues on the stream
    now.record(c10::impl::VirtualGuardImpl(stream_->device_type()).getStream(stream_->device()));
    now.block(*stream_);
    guard.reset_stream(*stream_);
  }
  own.reduced->wait();
  step_pieces(own.pieces);
  own.gathered = memory_of(index).gather_async(kInBackward);
  waiting_.reset();
}

void UpdateInBuckets::finish_bucket(size_t index) {
  if (waiting_ == index) update_waiting_bucket();
  auto& own = buckets_[index];
  waits_for_step() ? own.reduced->wait() : own.gathered->wait();
  if (own.averaged_extra) own.averaged_extra->wait();
  --unfinished_;
}

/// Steps the inner optimizer with the gradients of these pieces only.
void UpdateInBuckets::step_pieces(const std::vector<Piece>& pieces) {
  set_gradients(pieces);
  shard().inner().step();
  for (const auto& piece : pieces) piece.parameter.mutable_grad().reset();
}

void UpdateInBuckets::set_gradients(const std::vector<Piece>& pieces) const {
  for (const auto& piece : pieces)
    piece.parameter.mutable_grad() = has_arrived(piece.index) ? piece.gradient : at::Tensor();
}

// --- in step()

void UpdateInBuckets::begin_step() {
  OverlappedUpdate::begin_step();
  if (waits_for_step()) shard().take_writes();
}

void UpdateInBuckets::step(const at::Tensor& skip) {
  if (!waits_for_step()) return end_step_in_backward(skip);
  shard().prepare_step();
  for (const auto& bucket : buckets_) set_gradients(bucket.pieces);
  shard().step(skip, buckets_.size());
  end_step();
}

std::optional<std::vector<at::Tensor>> UpdateInBuckets::sharded_gradients() const {
  if (!waits_for_step()) return std::nullopt;
  std::vector<at::Tensor> gradients;
  for (const auto& bucket : buckets_)
    for (const auto& piece : bucket.pieces)
      if (has_arrived(piece.index)) gradients.push_back(piece.gradient);
  return gradients;
}

void UpdateInBuckets::check_finished() const {
  if (unfinished_ > 0)
    throw UsageError(shard().rank(), text("step() was called after a backward that did not finish, so ",
                                          waits_for_step() ? "gradients of some parameters are missing"
                                                           : "some parameters are updated and others are not",
                                          "; construct the wrapper and the optimizer anew, and load a checkpoint"));
}

void UpdateInBuckets::forget_step() {
  waiting_.reset();
  unfinished_ = 0;
}

}  // namespace lockstep::detail
