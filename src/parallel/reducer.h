#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <torch/csrc/autograd/function.h>

#include <lockstep/bucket_plan.h>
#include <lockstep/process_group.h>

#include "parallel/bucket.h"

namespace lockstep {

struct NamedParameter {
  std::string name;
  at::Tensor tensor;
};

struct ReducerOptions {
  BucketLimits limits;
  bool allow_unused = false;
};

/// Averages gradients over the ranks while backward runs. A hook on each parameter copies its gradient into a bucket; a
/// full bucket starts its all-reduce at once; when backward ends, every .grad() is the average, in the bucket's memory.
///
/// Each backward while enabled is one reduction, and collective. Hooks may come from several autograd threads.
class Reducer {
 public:
  Reducer(std::vector<NamedParameter> parameters, ProcessGroup group, const ReducerOptions& options);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// While disabled, gradients accumulate on this rank alone.
  void set_enabled(bool enabled);
  bool is_enabled() const;

  /// UsageError when the last backward broke off, since this rank has then left the others in the middle of it.
  void check_finished() const;

  const BucketPlan& plan() const { return plan_; }

 private:
  struct Place {
    size_t bucket;
    size_t slot;
  };
  class Hook;

  const at::Tensor& view_of(size_t parameter) const;
  void on_gradient(size_t parameter);
  void begin();
  void put_in_bucket(size_t parameter);
  void start_full_buckets();
  void mark_use();
  void finish();
  void restore_or_adopt(size_t parameter, bool used_somewhere, const at::Tensor& kept);
  void throw_unused(const std::vector<char>& used, const at::Tensor& unused_anywhere) const;

  const std::vector<NamedParameter> parameters_;
  const ProcessGroup group_;
  const ReducerOptions options_;
  const BucketPlan plan_;
  std::vector<Place> places_;                                         // constant after construction
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;  // kept alive: autograd holds them weakly
  std::vector<uintptr_t> hook_keys_;                                  // constant after construction

  mutable std::mutex mutex_;
  std::vector<Bucket> buckets_;  // guarded by mutex_
  std::vector<char> got_;        // guarded by mutex_: gradients of this backward
  std::vector<char> used_;       // guarded by mutex_: gradients since the last reduction, those of no_sync included
  size_t started_ = 0;           // guarded by mutex_: buckets whose all-reduce has started
  bool in_backward_ = false;     // guarded by mutex_
  bool enabled_ = true;          // guarded by mutex_
};

}  // namespace lockstep
