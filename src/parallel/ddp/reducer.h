#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm_hook.h>
#include <lockstep/process_group.h>
#include "parallel/ddp/bucket_plan.h"

#include "parallel/ddp/accumulator_hooks.h"
#include "parallel/ddp/batch_weight.h"
#include "parallel/ddp/bucket.h"
#include "parallel/ddp/logging_data.h"
#include "parallel/ddp/unused_parameters.h"

namespace lockstep {

struct NamedParameter {
  std::string name;
  at::Tensor tensor;
};

std::vector<at::Tensor> tensors_of(const std::vector<NamedParameter>& parameters);

struct ReducerOptions {
  BucketLimits limits{};
  bool allow_unused = false;
  bool static_graph = false;
  bool gradient_as_bucket_view = true;
  bool check_finite = false;
};

/// Averages gradients over the ranks while backward runs. A hook on each parameter copies its gradient into a bucket; a
/// full bucket starts its all-reduce at once; when backward ends, every .grad() is the average, in the bucket's memory.
///
/// Each outermost backward while enabled is one reduction, and collective. After the first the buckets are planned
/// anew, in the order in which rank 0's gradients came. Hooks may come from several autograd threads.
class Reducer {
 public:
  /// `parameters` are different tensors. `weight` and `recorder` outlive the reducer.
  Reducer(std::vector<NamedParameter> parameters, ProcessGroup group, const ReducerOptions& options,
          BatchWeight& weight, StepRecorder& recorder);
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// While disabled, gradients accumulate on this rank alone.
  void set_enabled(bool enabled);
  bool is_enabled() const;
  /// Whether gradients have accumulated on this rank alone since the last reduction.
  bool has_unsynchronised() const;

  /// UsageError after the first reduction, in which the graph is recorded.
  void set_static_graph();
  bool is_static_graph() const;
  /// UsageError when there is one already.
  void set_hook(CommHook hook);

  /// Before a forward: see AccumulatorHooks.
  void connect();

  /// Multiplies every gradient by this rank's factor of `weight`, from the next backward on.
  void weigh_gradients();
  bool weighs_gradients() const;

  /// Forgets a backward that was being captured in a CUDA graph when the capture failed: none of it has run. Its
  /// gradients are undefined afterwards.
  void abandon_capture();

  /// A backward that the calling thread is in has come to what the model returned: it will end with a reduction, even
  /// if no parameter gets a gradient.
  void on_output_gradient();

  /// Takes part in the others' reduction with nothing of its own, on a rank that has no input left, and has the
  /// average, too.
  void shadow();

  /// UsageError when the last backward broke off, since this rank has then left the others in the middle of it.
  void check_finished() const;

  /// So far, equal on all ranks.
  int64_t reductions() const;
  BucketPlan plan() const;
  const std::vector<NamedParameter>& parameters() const { return parameters_; }

 private:
  struct State {
    size_t bucket = 0;
    size_t slot = 0;
    bool is_in = false;  // in this backward
    int gradients = 0;   // in this backward: several where segments of it are recomputed
    int expected = 0;    // of them, with a static graph
    at::Tensor kept{};   // the old gradient, where the reduction writes over it
  };
  void make_buckets();
  at::Tensor weigh(const at::Tensor& gradient);
  // A rank that has no input in the first iteration of a join records later than the others; whether marks travel must
  // be the same everywhere.
  bool is_recording() const { return options_.static_graph && !has_recorded_; }
  bool knows_graph() const { return options_.static_graph && has_recorded_; }
  bool needs_marks() const { return !options_.static_graph || reductions_ == 0 || options_.check_finite; }
  const at::Tensor& view_of(size_t parameter) const;

  void on_gradient(size_t parameter, bool is_defined);
  void register_end_callback(const BackwardTask& task);
  void on_task_end(const BackwardTask& task);
  void begin();
  bool is_complete(size_t parameter);
  void put_in_bucket(size_t parameter);
  void put_without_new_gradient(size_t parameter);
  void start_full_buckets();
  void reduce_the_rest();
  void finish_all();
  void finish();
  void record_step(StepTimes::Clock::time_point computed);
  void learn_use();
  void publish_gradient(size_t parameter);
  void rebuild_buckets();
  [[noreturn]] void throw_broken_off() const;
  std::string describe_unused() const;
  void throw_not_finite() const;

  const std::vector<NamedParameter> parameters_;
  const ProcessGroup group_;
  ReducerOptions options_;  // guarded by mutex_
  BatchWeight& weight_;
  StepRecorder& recorder_;

  mutable std::mutex mutex_;  // guards all that follows
  BucketPlan plan_;
  std::vector<Bucket> buckets_;
  std::vector<State> states_;  // of the parameters
  std::vector<char> used_;     // which parameters are, since the last reduction, under no_sync included
  UnusedParameterBitmap marks_;
  CommHook hook_;
  bool enabled_ = true;
  bool has_unsynchronised_ = false;
  int64_t reductions_ = 0;
  bool has_recorded_ = false;  // with a static graph: a backward of this rank
  bool is_planned_anew_ = false;
  // Of the backward that runs:
  bool in_backward_ = false;
  StepTimes::Clock::time_point began_{};
  size_t started_ = 0;              // buckets whose reduction has started
  size_t in_ = 0;                   // gradients that are in their buckets
  std::vector<size_t> arrivals_;    // parameters, in the order of their gradients
  std::vector<const void*> tasks_;  // whose end will be told
  bool has_outermost_ = false;      // among them
  std::string not_finite_;          // the first parameter whose gradient is not
  AccumulatorHooks hooks_;          // last: destroyed first, so that nothing calls the rest any more
};

}  // namespace lockstep
