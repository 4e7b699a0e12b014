#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <c10/core/Stream.h>

#include "optim/zero/sharded_buckets.h"

// Overview.
//
// Overlap::kUpdate. While backward runs, each full bucket is reduce-scattered. The inner optimizer then steps the
// pieces of the bucket, which are all-gathered.
//
// On a CPU, a bucket is updated when the next bucket starts: it is probably reduced by then, so that the thread of
// backward does not wait for it. On a GPU, the update is queued at once, on a separate stream, and runs concurrently
// with backward. In a group of one rank, the pieces are stepped with the gradients in the bucket.

namespace lockstep::detail {

class UpdateInBackward final : public ShardedBuckets {
 public:
  explicit UpdateInBackward(std::shared_ptr<Shard> shard) : ShardedBuckets(std::move(shard)) {}

  Started update(const Bucket& bucket) override;
  void update_and_finish(const Bucket& bucket) override;
  void step(const at::Tensor& skip) override { end_step_in_backward(skip); }

 private:
  std::vector<Layout> prepare_buckets(const Plan& plan) override;
  bool waits_for_step() const override { return false; }
  const char* describe_unfinished() const override { return "some parameters are updated and others are not"; }
  void forget_step() override;

  void note_updates(const Bucket& bucket);
  void update_alone(const Bucket& bucket);
  void update_waiting_bucket();
  void step_pieces(const std::vector<Piece>& pieces);
  void finish_bucket(size_t index);

  std::vector<at::Tensor> alone_;  // in a group of one rank, by parameter: the inner optimizer's parameter; else empty
  std::optional<c10::Stream> stream_;          // on a GPU: for updates
  std::optional<size_t> waiting_;              // bucket that is being reduced and is not updated yet
  std::vector<std::optional<Work>> gathered_;  // by bucket: the all-gather of its parameters in the running step
};

}  // namespace lockstep::detail
