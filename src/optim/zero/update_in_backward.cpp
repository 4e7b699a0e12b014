#include "optim/zero/update_in_backward.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace lockstep::detail {

std::vector<BucketUpdate::Layout> UpdateInBackward::prepare_buckets(const Plan& plan) {
  const auto& group = shard().group();
  if (group.size() == 1) {
    alone_.resize(parameters().size());
    const auto inner = shard().inner_parameters();
    for (size_t i = 0; i < inner.size(); ++i) alone_[parameters().pieces()[i].overall.parameter] = inner[i];
    return {};
  }
  auto layouts = ShardedBuckets::prepare_buckets(plan);
  gathered_.resize(layouts.size());
  if (group.device().is_cuda())
    stream_ = c10::impl::VirtualGuardImpl(group.device().type()).getStreamFromGlobalPool(group.device());
  return layouts;
}

BucketUpdate::Started UpdateInBackward::update(const Bucket& bucket) {
  const c10::NoGradGuard no_grad;
  begin_bucket(bucket);
  note_updates(bucket);
  if (!alone_.empty()) {
    update_alone(bucket);
    return {std::nullopt, [] {}};
  }
  const auto reduced = start_reduction(bucket);
  update_waiting_bucket();  // all ranks make their calls in the same order
  waiting_ = bucket.index;
  if (stream_) update_waiting_bucket();
  return {reduced, [this, index = bucket.index] { finish_bucket(index); }};
}

void UpdateInBackward::update_and_finish(const Bucket& bucket) {
  if (!alone_.empty() || waiting_ || stream_) return update(bucket).finish();
  const c10::NoGradGuard no_grad;
  begin_bucket(bucket);
  note_updates(bucket);
  reduce(bucket);
  step_pieces(buckets()[bucket.index].pieces);
  memory_of(bucket.index).gather(kInBackward);
  end_bucket();
}

void UpdateInBackward::note_updates(const Bucket& bucket) {
  if (!shard().is_incomplete()) {
    shard().note_writes();
    begin_step_in_backward();
  }
  for (const auto& parameter : bucket.parameters) note_update(parameter);
}

/// In a group of one rank: steps the inner optimizer with the gradients of the bucket.
void UpdateInBackward::update_alone(const Bucket& bucket) {
  std::vector<Piece> pieces;
  for (size_t i = 0; i < bucket.parameters.size(); ++i) {
    const size_t index = index_of(bucket.parameters[i]);
    if (alone_[index].defined()) pieces.push_back({alone_[index], bucket.gradients[i], index});  // has elements
  }
  step_pieces(pieces);
  end_bucket();
}

void UpdateInBackward::update_waiting_bucket() {
  if (!waiting_) return;
  const size_t index = *waiting_;
  c10::OptionalStreamGuard guard;
  if (stream_) {
    c10::Event now(stream_->device_type());  // the capture of a CUDA graph continues on the stream
    now.record(c10::impl::VirtualGuardImpl(stream_->device_type()).getStream(stream_->device()));
    now.block(*stream_);
    guard.reset_stream(*stream_);
  }
  await_gradient(index);
  step_pieces(buckets()[index].pieces);
  gathered_[index] = memory_of(index).gather_async(kInBackward);
  waiting_.reset();
}

void UpdateInBackward::finish_bucket(size_t index) {
  if (waiting_ == index) update_waiting_bucket();
  gathered_[index]->wait();
  await_extra(index);
  end_bucket();
}

/// Steps the inner optimizer with the gradients of these pieces only.
void UpdateInBackward::step_pieces(const std::vector<Piece>& pieces) {
  set_gradients(pieces);
  shard().inner().step();
  for (const auto& piece : pieces) piece.parameter.mutable_grad().reset();
}

void UpdateInBackward::forget_step() {
  ShardedBuckets::forget_step();
  waiting_.reset();
}

}  // namespace lockstep::detail
