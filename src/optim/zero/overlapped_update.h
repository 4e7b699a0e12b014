#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "optim/zero/shard.h"
#include "optim/zero/update_strategy.h"
#include "parallel/ddp/bucket_update.h"

namespace lockstep::detail {

/// The part that strategies for Overlap::kGradients and Overlap::kUpdate have in common: the wrapper hands them buckets
/// of gradients during backward, and step() ends the step.
class OverlappedUpdate : public UpdateStrategy, public BucketUpdate {
 public:
  std::vector<Layout> prepare(const Plan& plan) final;
  void begin_step() override;
  void abandon() final;

 protected:
  explicit OverlappedUpdate(std::shared_ptr<Shard> shard)
      : shard_(std::move(shard)), arrived_(shard_->parameters().size()) {}

  Shard& shard() const { return *shard_; }
  ShardedParameters& parameters() const { return shard_->parameters(); }
  size_t index_of(const at::Tensor& parameter) const { return parameters().find(parameter).value(); }

  /// Throws UsageError if the ZeroRedundancyOptimizer was destroyed. Call it with each bucket.
  void check_optimizer_exists() const;
  /// Call it with the first bucket of a step whose parameters are updated in backward.
  void begin_step_in_backward();
  /// Notes that the averaged gradient of this parameter is available, or will be. Throws UsageError for a second
  /// backward before step().
  void note_gradient(const at::Tensor& parameter);
  /// The same for a parameter that is updated now. Changes its version for autograd and ShardedParameters::written().
  void note_update(const at::Tensor& parameter);
  bool has_arrived(size_t parameter) const { return arrived_[parameter] != 0; }
  /// Ends a step that backward has made. Throws UsageError if `skip`, which comes too late, is defined.
  void end_step_in_backward(const at::Tensor& skip);
  void end_step();

 private:
  virtual std::vector<Layout> prepare_buckets(const Plan& plan) = 0;
  /// Whether backward only averages gradients.
  virtual bool waits_for_step() const = 0;
  /// Throws UsageError if an update of the last backward has not finished.
  virtual void check_finished() const {}
  /// Drops the strategy's data of the running step.
  virtual void forget_step() = 0;

  const std::shared_ptr<Shard> shard_;
  std::vector<char> arrived_;  // by parameter: since the last step
};

}  // namespace lockstep::detail
