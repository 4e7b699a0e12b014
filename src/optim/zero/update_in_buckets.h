#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <c10/core/Stream.h>

#include "optim/zero/overlapped_update.h"

// Overview.
//
// ZeRO stage 2. prepare() divides the parameters anew, so that each bucket of gradients has a ShardedMemory of its own,
// and the bucket gets the layout of that memory. While backward runs, each full bucket is reduce-scattered: this rank
// receives its share of the average, and the memory of the bucket can be used for another one.
//
// With When::kInBackward the inner optimizer then steps the pieces of the bucket, which are all-gathered. On a CPU, a
// bucket is updated when the next one starts: it is probably reduced by then, so that the thread of backward does not
// wait for it. On a GPU, the update is queued at once, on a stream of its own, and runs beside backward.
//
// With When::kInStep the shares of the gradients stay, for clipping and for a GradScaler, and step() steps all pieces.

namespace lockstep::detail {

class UpdateInBuckets final : public OverlappedUpdate {
 public:
  enum class When { kInBackward, kInStep };

  UpdateInBuckets(std::shared_ptr<Shard> shard, When when) : OverlappedUpdate(std::move(shard)), when_(when) {}

  Started update(const Bucket& bucket) override;
  void update_and_finish(const Bucket& bucket) override;

  void begin_step() override;
  void step(const at::Tensor& skip) override;
  std::optional<std::vector<at::Tensor>> sharded_gradients() const override;

 private:
  struct Piece {
    at::Tensor parameter;  // of the inner optimizer
    at::Tensor gradient;   // a view of ReducedBucket::gradient
    size_t index;          // of the parameter
  };
  /// The memory with the same index has its parameters.
  struct ReducedBucket {
    at::Tensor gradient;  // this rank's share of the average
    std::vector<Piece> pieces{};
    // Of the running step:
    std::optional<Work> reduced{}, averaged_extra{}, gathered{};
  };

  std::vector<Layout> prepare_buckets(const Plan& plan) override;
  bool waits_for_step() const override { return when_ == When::kInStep; }
  void check_finished() const override;
  void forget_step() override;

  const ShardedMemory& memory_of(size_t bucket) const { return parameters().memories()[bucket].memory; }
  void begin_bucket(const Bucket& bucket);
  void update_alone(const Bucket& bucket);
  void update_waiting_bucket();
  void set_gradients(const std::vector<Piece>& pieces) const;
  void step_pieces(const std::vector<Piece>& pieces);
  void finish_bucket(size_t index);

  const When when_;
  std::vector<ReducedBucket> buckets_;
  std::vector<at::Tensor> alone_;      // by parameter, on the only rank: of the inner optimizer; others: empty
  std::optional<c10::Stream> stream_;  // on a GPU: for updates
  std::optional<size_t> waiting_;      // bucket that is being reduced and is not updated yet
  size_t unfinished_ = 0;              // buckets that were started in this backward
};

}  // namespace lockstep::detail
