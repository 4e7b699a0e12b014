#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include <lockstep/comm_hook.h>

#include "parallel/ddp/bucket.h"
#include "parallel/ddp/bucket_plan.h"
#include "parallel/ddp/bucket_update.h"

namespace lockstep {

/// Passes the buckets of a reducer to a BucketUpdate, instead of averaging them. If the update prescribes the layouts
/// of buckets, the buckets share a few slots of memory in turn: while one bucket is reduced, the next bucket is filled.
/// A gradient that has been copied into its slot is released, so gradients take little memory. Not thread-safe.
class BucketUpdater {
 public:
  /// The buckets of the plan must not exist yet. Rethrows the exceptions of BucketUpdate::prepare(). Collective.
  BucketUpdater(std::shared_ptr<detail::BucketUpdate> update, const ProcessGroup& group,
                const std::vector<NamedParameter>& parameters, const BucketPlan& plan);

  /// Whether buckets have prescribed layouts, and so slots.
  bool has_slots() const { return !slots_.empty(); }
  /// The layout and the memory of a bucket; none without slots.
  std::optional<Bucket::Prescribed> prescribed(size_t bucket) const;
  /// With slots: sorts the buckets of the plan by the time at which they are full. `arrivals` are the parameters in the
  /// order of their gradients. Returns whether the plan has changed.
  bool reorder(BucketPlan& plan, const std::vector<size_t>& arrivals);

  /// Call it when backward begins.
  void begin_backward(std::vector<Bucket>& buckets);
  /// Waits until no other bucket uses the memory of this bucket. Call it before the bucket's reduction starts.
  void await_slot(const Bucket& bucket);
  /// Lets a bucket use its slot before it is full.
  void open(Bucket& bucket);
  /// Starts to update the parameters of a bucket, except `frozen` parameters, by slot of the bucket. If `has_marks` is
  /// set, the last gradient of the last bucket holds the marks (see AveragingHook), which are averaged.
  FinishReduction start(const GradientBucket& bucket, const std::vector<char>& frozen, bool has_marks);
  void abandon() { update_->abandon(); }

 private:
  std::optional<Work>& user_of_slot(size_t bucket) { return users_[bucket % slots_.size()]; }

  const std::shared_ptr<detail::BucketUpdate> update_;
  const std::vector<detail::BucketUpdate::Layout> layouts_;  // by index in the plan that update_ knows
  std::vector<size_t> index_in_update_;                      // by bucket
  std::vector<at::Tensor> slots_;                            // bytes
  std::vector<std::optional<Work>> users_;                   // by slot: the reduction that may still read it
};

}  // namespace lockstep
