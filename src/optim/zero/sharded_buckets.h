#pragma once

#include <optional>
#include <vector>

#include "optim/zero/overlapped_update.h"

namespace lockstep::detail {

/// Buckets of gradients that are reduce-scattered during backward (ZeRO stage 2): this rank receives its share of the
/// average, and the memory of the bucket can be used for another bucket. prepare_buckets() divides the parameters
/// again, so that each bucket has a ShardedMemory of its own, and the bucket gets the layout of that memory.
class ShardedBuckets : public OverlappedUpdate {
 protected:
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
    std::optional<Work> reduced{}, averaged_extra{};
  };

  using OverlappedUpdate::OverlappedUpdate;

  std::vector<Layout> prepare_buckets(const Plan& plan) override;
  void check_finished() const override;
  void forget_step() override { unfinished_ = 0; }

  const std::vector<ReducedBucket>& buckets() const { return buckets_; }
  const ShardedMemory& memory_of(size_t bucket) const { return parameters().memories()[bucket].memory; }

  /// Call begin_bucket() for each bucket before its other calls, and end_bucket() after them.
  void begin_bucket(const Bucket& bucket);
  void end_bucket() { --unfinished_; }
  /// Starts to reduce-scatter the bucket, and to average its extra elements. The next two functions wait for these
  /// calls.
  Work start_reduction(const Bucket& bucket);
  void await_gradient(size_t bucket) { buckets_[bucket].reduced->wait(); }
  void await_extra(size_t bucket);
  /// The same on the calling thread.
  void reduce(const Bucket& bucket);
  /// Sets the gradients of these pieces in the inner optimizer.
  void set_gradients(const std::vector<Piece>& pieces) const;

 private:
  /// Describes, for an error message, what is wrong after a backward that did not finish.
  virtual const char* describe_unfinished() const = 0;

  std::vector<ReducedBucket> buckets_;
  size_t unfinished_ = 0;  // buckets that were started in this backward
};

}  // namespace lockstep::detail
