#include "optim/zero/sharded_gradients.h"

#include <c10/core/GradMode.h>

namespace lockstep::detail {

BucketUpdate::Started ShardedGradients::update(const Bucket& bucket) {
  const c10::NoGradGuard no_grad;
  begin_bucket(bucket);
  note_gradients(bucket);
  const auto reduced = start_reduction(bucket);
  return {reduced, [this, index = bucket.index] {
            await_gradient(index);
            await_extra(index);
            end_bucket();
          }};
}

void ShardedGradients::update_and_finish(const Bucket& bucket) {
  if (!bucket.buffer.is_cpu()) return update(bucket).finish();
  const c10::NoGradGuard no_grad;
  begin_bucket(bucket);
  note_gradients(bucket);
  reduce(bucket);
  end_bucket();
}

void ShardedGradients::note_gradients(const Bucket& bucket) {
  for (const auto& parameter : bucket.parameters) note_gradient(parameter);
}

void ShardedGradients::begin_step() {
  OverlappedUpdate::begin_step();
  shard().accept_writes();
}

void ShardedGradients::step(const at::Tensor& skip) {
  shard().prepare_step();
  for (const auto& bucket : buckets()) set_gradients(bucket.pieces);
  shard().step(skip, buckets().size());
  end_step();
}

std::optional<std::vector<at::Tensor>> ShardedGradients::sharded_gradients() const {
  std::vector<at::Tensor> gradients;
  for (const auto& bucket : buckets())
    for (const auto& piece : bucket.pieces)
      if (has_arrived(piece.index)) gradients.push_back(piece.gradient);
  return gradients;
}

}  // namespace lockstep::detail
