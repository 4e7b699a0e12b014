#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <lockstep/bucket_plan.h>
#include <lockstep/export.h>
#include <lockstep/process_group.h>

namespace lockstep {

struct DistributedDataParallelOptions {
  /// Before each forward in training, every rank takes rank 0's buffers (running statistics and the like).
  bool broadcast_buffers = true;
  /// Parameters that get no gradient on a rank count as zero there, and one that gets none anywhere keeps its old
  /// gradient. Otherwise a parameter without a gradient is an error on every rank.
  bool find_unused_parameters = false;
  BucketLimits buckets{};
};

namespace detail {

class Replica;

/// While it lives, backward leaves gradients on this rank.
class LOCKSTEP_EXPORT NoSync {
 public:
  explicit NoSync(std::shared_ptr<Replica> replica);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::shared_ptr<Replica> replica_;
  bool was_enabled_;
};

LOCKSTEP_EXPORT std::shared_ptr<Replica> make_replica(std::shared_ptr<torch::nn::Module> module, ProcessGroup group,
                                                      const DistributedDataParallelOptions& options);
LOCKSTEP_EXPORT void before_forward(Replica& replica);
LOCKSTEP_EXPORT const BucketPlan& bucket_plan(const Replica& replica);

}  // namespace detail

/// A model that trains on all ranks of a group as one process would on the concatenated batch.
///
/// Wrapping is collective: it checks that every rank has the same model (MismatchError naming the first difference) and
/// takes rank 0's parameters and buffers everywhere. After that each `loss.backward()` is collective too, and when it
/// returns, `.grad()` of every parameter is the mean over the ranks: do not divide by the world size again. Forward
/// through the wrapper or through the module itself, both synchronise, since the hooks sit on the parameters; only the
/// wrapper broadcasts buffers.
///
/// `.grad()` lives in memory of the wrapper: use it freely, but do not keep it beyond the next backward.
///
/// Not thread-safe, like the module it wraps. Movable; the module may outlive it.
template <class Module>
class DistributedDataParallel {
 public:
  DistributedDataParallel(std::shared_ptr<Module> module, ProcessGroup group,
                          const DistributedDataParallelOptions& options = {})
      : module_(std::move(module)), replica_(detail::make_replica(module_, std::move(group), options)) {}

  DistributedDataParallel(const torch::nn::ModuleHolder<Module>& module, ProcessGroup group,
                          const DistributedDataParallelOptions& options = {})
      : DistributedDataParallel(module.ptr(), std::move(group), options) {}

  /// The module's forward, with its arguments and its result.
  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    detail::before_forward(*replica_);
    return module_->forward(std::forward<Args>(args)...);
  }

  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  const std::shared_ptr<Module>& module() const { return module_; }
  Module* operator->() const { return module_.get(); }

  std::vector<at::Tensor> parameters() const { return module_->parameters(); }

  /// { auto guard = ddp.no_sync(); loss.backward(); }: gradients accumulate on this rank; the first backward after the
  /// guard is gone averages what has come together.
  [[nodiscard]] detail::NoSync no_sync() const { return detail::NoSync(replica_); }

  const BucketPlan& bucket_plan() const { return detail::bucket_plan(*replica_); }

 private:
  std::shared_ptr<Module> module_;
  std::shared_ptr<detail::Replica> replica_;
};

template <class Module>
DistributedDataParallel(const torch::nn::ModuleHolder<Module>&, ProcessGroup, const DistributedDataParallelOptions&)
    -> DistributedDataParallel<Module>;
template <class Module>
DistributedDataParallel(const torch::nn::ModuleHolder<Module>&, ProcessGroup) -> DistributedDataParallel<Module>;

}  // namespace lockstep
