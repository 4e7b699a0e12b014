#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm_hook.h>
#include <lockstep/process_group.h>

#include "comm/watch/activity.h"
#include "parallel/ddp/accumulator_hooks.h"
#include "parallel/ddp/batch_weight.h"
#include "parallel/ddp/bucket.h"
#include "parallel/ddp/bucket_plan.h"
#include "parallel/ddp/bucket_updater.h"
#include "parallel/ddp/in_place_gradients.h"
#include "parallel/ddp/logging_data.h"
#include "parallel/ddp/reachable_parameters.h"
#include "parallel/ddp/unused_parameters.h"

namespace lockstep {

std::vector<at::Tensor> tensors_of(const std::vector<NamedParameter>& parameters);

struct ReducerOptions {
  BucketLimits limits{};
  bool allow_unused = false;
  bool static_graph = false;
  bool gradient_as_bucket_view = true;
  bool in_place_gradients = true;
  bool check_finite = false;
  std::optional<at::ScalarType> reduce_dtype{};
  std::vector<std::string> sparse_parameters{};  // names of parameters whose gradients are sparse
  bool densify_sparse_gradients = false;
  /// Does not wait on the host for what other ranks report about a reduction, where this rank does not need it: see
  /// check_deferred(). For GPUs.
  bool defers_marks = false;
};

/// Averages gradients over the ranks while backward runs. A hook on each parameter copies the gradient into a bucket. A
/// full bucket's all-reduce starts at once. When backward ends, every .grad() is the average, in the bucket's memory if
/// gradient_as_bucket_view is set. Sparse gradients are not in buckets: their rows are gathered at the end of backward.
///
/// Each outermost backward while enabled is one reduction, and collective. After the first reduction the buckets are
/// rebuilt in the order in which rank 0's gradients arrived. Thread-safe: autograd may call hooks on several threads.
class Reducer {
 public:
  /// `parameters` must be distinct tensors. `weight` and `recorder` must outlive the reducer.
  Reducer(std::vector<NamedParameter> parameters, ProcessGroup group, const ReducerOptions& options,
          BatchWeight& weight, StepRecorder& recorder);
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// While disabled, gradients accumulate on this rank only, without communication.
  void set_enabled(bool enabled);
  bool is_enabled() const;
  /// Whether a backward of the parameters that are trained now would be reduced.
  bool will_reduce() const;
  /// Whether gradients have accumulated while disabled since the last reduction.
  bool has_unsynchronized() const;

  /// Throws UsageError after the first reduction, because that reduction records the graph.
  void set_static_graph();
  bool is_static_graph() const;
  /// Throws UsageError if a hook is set already.
  void set_hook(CommHook hook);
  /// Hands buckets to `update` instead of averaging them: see Overlap. Throws UsageError if the options or a hook rule
  /// it out, and what BucketUpdate::prepare() throws. Collective.
  void set_update(std::shared_ptr<detail::BucketUpdate> update);
  /// Throws what set_update() would throw on this rank. Not collective.
  void check_can_update() const;
  bool updates_in_backward() const;

  /// Call it before each forward: hooks the accumulators (see AccumulatorHooks::connect; not during backward), and
  /// notes which parameters are frozen.
  void begin_forward();

  /// Call it after each forward, with the tensors that it returned. Walks over their graph if parameters may be unused.
  void end_forward(const std::vector<at::Tensor>& outputs);

  /// From the next backward on, multiplies every gradient by this rank's factor of `weight`.
  void weigh_gradients();
  bool weighs_gradients() const;

  /// Discards a backward whose capture in a CUDA graph failed: none of its kernels has run. All gradients are undefined
  /// tensors afterwards.
  void abandon_capture();

  /// Called when the calling thread's backward reaches an output of the model. Ensures that this backward ends with a
  /// reduction, even if no parameter gets a gradient.
  void on_output_gradient();

  /// Takes part in the other ranks' reduction with gradients of zero, on a rank that has no input left in a join. This
  /// rank's .grad() becomes the average as well.
  void shadow();

  /// Throws UsageError if the last backward was interrupted: this rank then left the others in the middle of a
  /// reduction.
  void check_finished() const;

  /// Throws if other ranks froze other parameters than this rank, or used fewer, in a reduction that has been deferred.
  /// finish() throws the same for other reductions.
  void check_deferred();

  /// Number of reductions so far; equal on all ranks.
  int64_t reductions() const;
  BucketPlan plan() const;
  const std::vector<NamedParameter>& parameters() const { return parameters_; }

 private:
  struct State {
    size_t bucket = 0;
    size_t slot = 0;
    bool is_in = false;  // the gradient of this backward is in its bucket
    int gradients = 0;   // arrived in this backward: several if checkpointed segments share the parameter
    int expected = 0;    // static graph only: gradients per backward
    at::Tensor kept{};   // copy of the old gradient, if the reduction overwrites it
  };
  bool is_sparse(size_t parameter) const { return sparse_[parameter] != 0; }
  /// Whether .grad() of the parameter is the bucket's memory.
  bool is_bucket_view(size_t parameter) const;
  bool may_be_computed_in_bucket(size_t parameter) const;
  void reserve_places();
  void release_place(size_t parameter, const at::Tensor& gradient, const at::Tensor& arrived);
  std::vector<detail::GradientSpec> specs() const;
  void make_buckets();
  at::Tensor weigh(const at::Tensor& gradient);
  // A rank that has no input in the first iteration of a join records its graph later than the others. needs_marks()
  // therefore depends on reductions_ instead: ranks must agree on whether marks are sent.
  bool is_recording() const { return options_.static_graph && !has_recorded_; }
  bool knows_graph() const { return options_.static_graph && has_recorded_; }
  bool predicts_unused() const { return options_.allow_unused && !options_.static_graph; }
  bool needs_marks() const { return !options_.static_graph || reductions_ == 0 || options_.check_finite; }
  bool has_slots() const { return updater_ && updater_->has_slots(); }
  const at::Tensor& view_of(size_t parameter) const;
  bool is_frozen(size_t parameter) const;
  bool are_all_frozen() const;

  void on_gradient(size_t parameter, const at::Tensor& arrived);
  void register_end_callback(const BackwardTask& task);
  void refuse_create_graph() const;
  void on_task_end(const BackwardTask& task);
  void begin();
  bool is_complete(size_t parameter);
  void put_in_bucket(size_t parameter, const at::Tensor& arrived = {});
  void put_without_new_gradient(size_t parameter);
  FinishReduction start_update(const GradientBucket& bucket);
  void start_bucket(size_t bucket);
  void start_full_buckets();
  void compare_with_prediction();
  void reduce_the_rest();
  void reduce_sparse_gradients();
  void finish_all();
  void finish();
  void record_step(const Moment& computed);
  void read_usage_marks();
  void publish_gradient(size_t parameter);
  void rebuild_buckets();
  [[noreturn]] void throw_interrupted_backward() const;
  bool needs_all_parameters() const;
  std::string describe_unused(const std::vector<char>& used) const;
  void throw_not_finite() const;
  void check_frozen_alike() const;
  [[noreturn]] void throw_unexpected_gradient(size_t parameter) const;

  const std::vector<NamedParameter> parameters_;
  const ProcessGroup group_;
  ReducerOptions options_;          // guarded by mutex_
  const std::vector<char> sparse_;  // by parameter: its gradient is sparse
  BatchWeight& weight_;
  StepRecorder& recorder_;
  const std::shared_ptr<detail::Activity> activity_;

  mutable std::mutex mutex_;  // guards all members below
  BucketPlan plan_;
  int64_t plans_ = 0;  // number of plans so far
  std::vector<Bucket> buckets_;
  InPlaceGradients in_place_;
  std::vector<State> states_;             // by parameter
  std::vector<char> used_;                // by parameter: got a gradient since the last reduction, no_sync() included
  bool in_forward_ = false;               // the wrapper's forward was called since the last reduction
  std::vector<char> trained_in_forward_;  // by parameter: was not frozen in one of these forwards
  UnusedParameterBitmap marks_;
  ReachableParameters reachable_;
  CommHook hook_;
  std::unique_ptr<BucketUpdater> updater_;  // null: gradients are averaged
  bool enabled_ = true;
  bool has_unsynchronized_ = false;
  int64_t reductions_ = 0;
  bool has_recorded_ = false;     // a backward of this rank has recorded the static graph
  bool buckets_rebuilt_ = false;  // rebuild_buckets() was called
  // State of the running backward:
  bool in_backward_ = false;
  Moment began_{};
  std::vector<char> frozen_;        // by parameter: takes no part
  size_t started_ = 0;              // buckets whose reduction has started
  size_t in_ = 0;                   // gradients that are in their buckets
  std::vector<size_t> arrivals_;    // parameters in the order in which their gradients arrived
  std::vector<const void*> tasks_;  // running tasks with a registered end callback
  bool has_outermost_ = false;      // tasks_ had a task of depth 0
  std::string not_finite_;          // the first parameter whose gradient is not finite
  AccumulatorHooks hooks_;          // last, so it is destroyed first: its callbacks use the other members
};

}  // namespace lockstep
