#include "optim/zero/sharded_buckets.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep::detail {

std::vector<BucketUpdate::Layout> ShardedBuckets::prepare_buckets(const Plan& plan) {
  const c10::NoGradGuard no_grad;
  std::vector<std::vector<size_t>> lists;
  for (const auto& bucket : plan.buckets) {
    auto& members = lists.emplace_back();
    for (size_t i : bucket) members.push_back(index_of(plan.parameters[i].second));
  }
  shard().divide(lists);

  std::vector<Layout> layouts;
  for (size_t b = 0; b < lists.size(); ++b) {
    const auto& memory = memory_of(b);
    buckets_.push_back({shard().group().allocate({memory.share_elements()}, memory.dtype()).zero_()});
    layouts.push_back({memory.offsets(), memory.elements()});
  }
  const auto inner = shard().inner_parameters();
  for (size_t i = 0; i < inner.size(); ++i) {
    const auto& piece = parameters().pieces()[i];
    if (piece.memory >= buckets_.size()) continue;  // of a parameter that was frozen when the model was wrapped
    auto& bucket = buckets_[piece.memory];
    bucket.pieces.push_back(
        {inner[i], memory_of(piece.memory).values_in_share(piece.in_memory, bucket.gradient), piece.overall.parameter});
  }
  return layouts;
}

void ShardedBuckets::begin_bucket(const Bucket& bucket) {
  check_optimizer_exists();
  ++unfinished_;
  if (bucket.extra.defined()) bucket.averaged_extra.copy_(bucket.extra);
}

Work ShardedBuckets::start_reduction(const Bucket& bucket) {
  auto& own = buckets_[bucket.index];
  own.reduced = memory_of(bucket.index).reduce_scatter_async(own.gradient, bucket.buffer, kInBackward);
  own.averaged_extra.reset();
  if (bucket.extra.defined())
    own.averaged_extra = shard().group().all_reduce_async(bucket.averaged_extra, ReduceOp::kAvg, kInBackward);
  return *own.reduced;
}

void ShardedBuckets::await_extra(size_t bucket) {
  if (auto& average = buckets_[bucket].averaged_extra) average->wait();
}

void ShardedBuckets::reduce(const Bucket& bucket) {
  memory_of(bucket.index).reduce_scatter(buckets_[bucket.index].gradient, bucket.buffer, kInBackward);
  if (bucket.extra.defined()) shard().group().all_reduce(bucket.averaged_extra, ReduceOp::kAvg, kInBackward);
}

void ShardedBuckets::set_gradients(const std::vector<Piece>& pieces) const {
  for (const auto& piece : pieces)
    piece.parameter.mutable_grad() = has_arrived(piece.index) ? piece.gradient : at::Tensor();
}

void ShardedBuckets::check_finished() const {
  if (unfinished_ > 0)
    throw UsageError(shard().rank(),
                     text("step() was called after a backward that did not finish, so ", describe_unfinished(),
                          "; construct the wrapper and the optimizer again, and load a checkpoint"));
}

}  // namespace lockstep::detail
