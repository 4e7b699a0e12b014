#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm_hook.h>
#include <lockstep/process_group.h>

#include "comm/watch/activity.h"
#include "parallel/ddp/accumulator_hooks.h"
#include "parallel/ddp/batch_weight.h"
#include "parallel/ddp/gradient_arrivals.h"
#include "parallel/ddp/gradient_buckets.h"
#include "parallel/ddp/logging_data.h"
#include "parallel/ddp/parameter_usage.h"

namespace lockstep {

std::vector<at::Tensor> tensors_of(const std::vector<NamedParameter>& parameters);

struct ReducerOptions {
  GradientBuckets::Options buckets{};
  bool allow_unused = false;
  bool static_graph = false;
  bool check_finite = false;
  std::vector<std::string> sparse_parameters{};  // names of parameters whose gradients are sparse
  bool densify_sparse_gradients = false;
  /// The host does not wait for the marks of the other ranks if this rank does not need them: see check_deferred(). For
  /// GPUs.
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
  /// Passes buckets to `update` instead of averaging them: see Overlap. Throws UsageError if the options or a hook rule
  /// it out, and the exceptions of BucketUpdate::prepare(). Collective.
  void set_update(std::shared_ptr<detail::BucketUpdate> update);
  /// Throws the UsageError that set_update() would throw on this rank. Not collective.
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

  /// Throws UsageError if the last backward was interrupted: this rank then left the other ranks in the middle of a
  /// reduction.
  void check_finished() const;

  /// Throws if other ranks froze different parameters than this rank, or used fewer, in a reduction whose marks were
  /// deferred. finish() throws the same errors for other reductions.
  void check_deferred();

  /// Number of reductions so far; equal on all ranks.
  int64_t reductions() const;
  BucketPlan plan() const;
  const std::vector<NamedParameter>& parameters() const { return parameters_; }

 private:
  bool is_sparse(size_t parameter) const { return sparse_[parameter] != 0; }
  bool predicts_unused() const { return options_.allow_unused && !arrivals_.is_static_graph(); }
  bool needs_marks() const;
  bool needs_all_parameters() const;
  at::Tensor weigh(const at::Tensor& gradient);

  void on_gradient(size_t parameter, const at::Tensor& arrived);
  void register_end_callback(const BackwardTask& task);
  void on_task_end(const BackwardTask& task);
  void begin();
  void hand_over(size_t parameter, const at::Tensor& arrived = {});
  void hand_over_without_new_gradient(size_t parameter);
  void finish();
  void read_marks();
  void reduce_sparse_gradients();
  void publish_gradients();
  void end_reduction();
  void record_step(const Moment& computed);
  [[noreturn]] void throw_interrupted_backward() const;

  const std::vector<NamedParameter> parameters_;
  const ProcessGroup group_;
  const ReducerOptions options_;    // without static_graph, which arrivals_ has
  const std::vector<char> sparse_;  // by parameter: its gradient is sparse
  BatchWeight& weight_;
  StepRecorder& recorder_;
  const std::shared_ptr<detail::Activity> activity_;

  mutable std::mutex mutex_;  // guards all members below
  ParameterUsage usage_;
  GradientArrivals arrivals_;
  GradientBuckets buckets_;
  bool enabled_ = true;
  bool has_unsynchronized_ = false;
  int64_t reductions_ = 0;
  // State of the running backward:
  bool in_backward_ = false;
  Moment began_{};
  std::vector<char> is_handed_over_;  // by parameter: to its bucket or, if it is sparse, to the end of backward
  std::vector<at::Tensor> kept_;      // by parameter: copy of the old gradient, if the reduction overwrites it
  std::vector<const void*> tasks_;    // running tasks with a registered end callback
  bool has_outermost_ = false;        // tasks_ had a task of depth 0
  std::string not_finite_;            // the first parameter whose gradient is not finite
  AccumulatorHooks hooks_;            // last, so it is destroyed first: its callbacks use the other members
};

}  // namespace lockstep
