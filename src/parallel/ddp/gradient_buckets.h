#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm_hook.h>
#include <lockstep/process_group.h>

#include "parallel/ddp/bucket.h"
#include "parallel/ddp/bucket_plan.h"
#include "parallel/ddp/bucket_updater.h"
#include "parallel/ddp/in_place_gradients.h"
#include "parallel/ddp/logging_data.h"
#include "parallel/ddp/parameter_usage.h"

namespace lockstep {

/// The buckets of all dense gradients: where each gradient lies, and when the reduction of a bucket starts. Buckets are
/// averaged, or passed to a comm hook or a BucketUpdate. Their reductions start in the order of the plan, on every
/// rank. The last bucket also carries the marks of ParameterUsage. Not thread-safe.
class GradientBuckets {
 public:
  struct Options {
    BucketLimits limits{};
    bool gradient_as_bucket_view = true;
    bool in_place_gradients = true;
    std::optional<at::ScalarType> reduce_dtype{};
  };

  /// `sparse` marks the parameters whose gradients are in no bucket. `parameters`, `sparse`, `usage` and `recorder`
  /// must outlive the object. The first plan expects gradients in reverse order of registration.
  GradientBuckets(const std::vector<NamedParameter>& parameters, const std::vector<char>& sparse, ProcessGroup group,
                  const Options& options, const ParameterUsage& usage, const StepRecorder& recorder);

  const BucketPlan& plan() const { return plan_; }
  /// The bucket with the marks.
  Bucket& last() { return buckets_.back(); }
  std::vector<StepTimes::Bucket> times() const;

  bool has_hook() const { return hook_ != nullptr; }
  void set_hook(CommHook hook) { hook_ = std::move(hook); }
  /// Passes buckets to `update` instead of averaging them. Rethrows the exceptions of BucketUpdate::prepare(); the
  /// buckets are then unchanged. Collective.
  void set_update(std::shared_ptr<detail::BucketUpdate> update);
  bool has_update() const { return updater_ != nullptr; }

  /// The gradient's memory in its bucket.
  const at::Tensor& view(size_t parameter) const;
  /// Whether .grad() of the parameter is the gradient's memory in its bucket.
  bool is_view(size_t parameter) const;

  // A backward.

  /// Call it when backward begins. Every gradient is missing now. Reductions carry marks if `has_marks` is set.
  void begin_backward(bool has_marks);
  /// Lets this backward compute gradients in their buckets, except gradients that are in their buckets already:
  /// `is_in`, by parameter.
  void reserve_in_place(const std::vector<char>& is_in);
  void withdraw_in_place() const { in_place_.withdraw(); }
  /// Copies a complete gradient into its bucket, unless it was computed there; zeros if it is undefined. `arrived` is
  /// the gradient that autograd has just accumulated.
  void put(size_t parameter, const at::Tensor& gradient, const at::Tensor& arrived);
  /// Call it after put(). Frees the memory of .grad() while it is in the cache, so that autograd can reuse it for the
  /// next gradient.
  void release(size_t parameter);
  /// Returns the gradient in the bucket after all copies to it.
  const at::Tensor& read(size_t parameter);
  /// Starts the reductions of full buckets.
  void start_full();
  /// Reduces the remaining buckets, which must be full, and waits for all. Collective.
  void finish_backward();

  /// Takes part in a reduction with gradients of zero. Collective.
  void reduce_zeros(bool has_marks);
  /// Call it after a reduction. Lets .grad() be the average.
  void publish(size_t parameter);
  /// Plans the buckets again, once, in the order in which rank 0's gradients have arrived. Collective.
  void rebuild(const std::vector<size_t>& arrivals);
  /// Drops a backward whose capture in a CUDA graph failed.
  void abandon();

 private:
  struct Location {
    size_t bucket = 0;
    size_t slot = 0;
  };

  bool has_slots() const { return updater_ && updater_->has_slots(); }
  bool is_sparse(size_t parameter) const { return sparse_[parameter] != 0; }
  bool may_be_computed_in_bucket(size_t parameter) const;
  void release_place(size_t parameter, const at::Tensor& gradient, const at::Tensor& arrived);
  std::vector<detail::GradientSpec> specs() const;
  void make_buckets();
  void start(size_t index);
  FinishReduction start_update(const GradientBucket& bucket);
  void await_all();
  std::vector<size_t> agree_on_order(const std::vector<size_t>& arrivals) const;

  const std::vector<NamedParameter>& parameters_;
  const std::vector<char>& sparse_;  // by parameter
  const ProcessGroup group_;
  const Options options_;
  const ParameterUsage& usage_;
  const StepRecorder& recorder_;
  BucketPlan plan_;
  int64_t plans_ = 0;  // number of plans so far
  bool is_rebuilt_ = false;
  std::vector<Bucket> buckets_;
  std::vector<Location> locations_;  // by parameter
  InPlaceGradients in_place_;
  CommHook hook_;
  std::unique_ptr<BucketUpdater> updater_;  // null: gradients are averaged
  bool has_marks_ = true;                   // in this backward
  size_t started_ = 0;                      // buckets whose reduction has started in this backward
};

}  // namespace lockstep
