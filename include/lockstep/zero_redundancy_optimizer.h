#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/optim/adagrad.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>

#include <lockstep/bucket_update.h>
#include <lockstep/export.h>
#include <lockstep/fused_optimizers.h>
#include <lockstep/gradient_tools.h>
#include <lockstep/join.h>
#include <lockstep/optimizer_state.h>
#include <lockstep/process_group.h>

namespace lockstep {

/// The unit in which ZeroRedundancyOptimizer divides parameters between ranks.
enum class ShardBy {
  /// Elements: shards have equal size, whatever the sizes of the parameters. For optimizers that update each element
  /// from its own gradient and state, such as SGD and Adam.
  kElements,
  /// Whole parameters. For optimizers that need a whole parameter, such as LARS and LAMB.
  kParameters,
};

struct ZeroRedundancyOptions {
  /// Default: kElements for optimizers that are known to update each element independently (LibTorch's SGD, Adam,
  /// AdamW, Adagrad and RMSprop, and lockstep's fused optimizers), otherwise kParameters.
  std::optional<ShardBy> shard_by{};
  /// Called at the start of each step, to change gradients on every rank, for example to clip them. In a join, also
  /// called on ranks without inputs, which also call step().
  std::function<void()> before_step{};
  /// Keeps one copy of the parameters for all ranks of the group, in shared memory, so that an updated shard need not
  /// be sent. All ranks must be on one host (backend "shm" or "threads") and must start with equal parameters. Only
  /// step() may change the parameters afterwards: see docs/optimizers.md for loading. If some ranks write to a
  /// parameter and others do not, the next step (or backward) throws MismatchError on all ranks, which names it. This
  /// detects writes that change the tensor's version, as operators in place and collectives do, and replaced memory
  /// (set_data, torch::load). A write through data() or data_ptr() changes the parameter for all ranks unnoticed.
  bool share_parameters = false;
  /// With update_in_backward and share_parameters, keeps a copy of the parameters and the state before each step, so
  /// that undo_step() can restore them. Takes as much memory again, and time to write it.
  bool undo = false;
  /// With update_in_backward, not with share_parameters: backward only averages gradients, of which each rank keeps its
  /// share, and step() updates the parameters. In-between, gradients can be clipped with clip_grad_norm(), and a
  /// GradScaler can be used.
  bool hold_updates = false;
};

namespace detail {

/// An optimizer that holds gradients itself: its parameters have none.
class LOCKSTEP_EXPORT HeldGradients {
 public:
  virtual ~HeldGradients() = default;
  /// Returns this rank's share of the gradients, or none if the gradients are those of the parameters.
  virtual std::optional<std::vector<at::Tensor>> held_gradients() const = 0;
  /// Replaces a number by its maximum over all ranks that have a share. Collective.
  virtual void take_maximum(const at::Tensor& number) const = 0;
};

}  // namespace detail

/// The part of ZeroRedundancyOptimizer that does not depend on the optimizer's class.
class LOCKSTEP_EXPORT ZeroRedundancyOptimizerBase : public torch::optim::Optimizer,
                                                    public Joinable,
                                                    public SkippableStep,
                                                    public detail::HeldGradients {
 public:
  ~ZeroRedundancyOptimizerBase() override;

  /// Updates this rank's shard of the parameters, then all-gathers the shards of all ranks. Collective. Throws
  /// UsageError if a parameter has changed its device, dtype or sizes. The first step (with gradients that are finite)
  /// throws MismatchError on all ranks, before any update, if parameters or gradients differ between the ranks by more
  /// than rounding.
  at::Tensor step(LossClosure closure = nullptr) override;
  /// Collective. `skip` must be equal on all ranks. See SkippableStep; the host waits for the GPU unless the inner
  /// optimizer is a SkippableStep.
  void step_unless(const at::Tensor& skip) override;

  /// For DistributedDataParallel::update_in_backward(): updates the parameters bucket by bucket while backward runs.
  /// step() then only ends the step. Each bucket is reduce-scattered, this rank's share is updated, and the shares are
  /// all-gathered; or, with share_parameters, all ranks update their parts of the shared parameters, which requires
  /// FusedAdamW, FusedAdam or FusedSGD without master weights. Throws UsageError if before_step is set.
  /// update_in_backward() throws UsageError on all ranks for a parameter that requires a gradient and that the wrapper
  /// does not reduce: one that is not in the wrapped model, or in the wrapper's option ignore.
  std::shared_ptr<BucketUpdate> bucket_update() const;

  /// With the option hold_updates, between backward and step(): scales the gradients of all ranks' shares, as
  /// clip_grad_norm_() does with whole gradients. Returns the norm before scaling. Collective. Does not wait for the
  /// GPU. Throws UsageError without hold_updates.
  at::Tensor clip_grad_norm(double max_norm, const ClipGradNormOptions& options = {});

  /// Restores the parameters and the state to those before a step that an error has interrupted, such as the end of
  /// another rank during backward. Needs the option undo. Returns whether there was a step to undo. Not collective: the
  /// parameters are complete once every rank that is still alive has called it; shards of ranks that have ended are
  /// restored by the others.
  bool undo_step();

  /// Returns, on rank `dst`, the state of all ranks combined, as an optimizer without shards would have it, on the CPU.
  /// Returns an empty state on the other ranks. Collective. If a rank failed during a step, the shards may be from
  /// different steps: throws UsageError, or the group's error if the failure is detected later.
  OptimizerState consolidated_state_dict(int dst = 0) const;
  /// Loads a complete state, saved with any number of ranks, with or without shards. Not collective: every rank passes
  /// the complete state. Throws UsageError if the state belongs to other parameters or another kind of optimizer.
  void load_state_dict(const OptimizerState& state);

  /// For checkpoints (see TrainingState). state_dict() is consolidated_state_dict(0) as a Value. Collective.
  Value state_dict() const;
  void load_state_dict(const Value& value);
  /// Returns this rank's part of the state. The tensors are those of the optimizer, not copies. Not collective. Throws
  /// as consolidated_state_dict() does.
  Value shard_state_dict() const;
  /// Loads the parts of a state that `shards` ranks had. `read` returns one of them; with the option map_location =
  /// torch::kMeta, without data. Only shards that have elements of this rank's share are read. Not collective. Throws
  /// UsageError if the state belongs to other parameters or another kind of optimizer.
  void load_shards(size_t shards, const ReadShard& read);

  /// Always throw UsageError, which names the method to use instead: this rank has only a shard of the state, and save
  /// and load are not collective.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  /// Returns the bytes of the tensors in this rank's shard of the state. For an inner optimizer that is not one of
  /// LibTorch's or lockstep's, copies the state to count them.
  int64_t state_bytes() const;

  std::optional<std::vector<at::Tensor>> held_gradients() const override;
  void take_maximum(const at::Tensor& number) const override;

  /// Call before each replay of your own CUDA graph if the inner optimizer is a fused one. CapturedStep calls it
  /// itself.
  void before_replay();

 protected:
  using Make =
      std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<torch::optim::OptimizerParamGroup> groups)>;

  ZeroRedundancyOptimizerBase(std::vector<torch::optim::OptimizerParamGroup> groups, std::vector<std::string> names,
                              std::unique_ptr<torch::optim::OptimizerOptions> defaults, ProcessGroup group,
                              const ZeroRedundancyOptions& options, ShardBy shard_by, const Make& make,
                              void (*before_replay)(torch::optim::Optimizer&));

 private:
  // Joinable. In the list of members, the optimizer follows the wrapper that averages its gradients.
  ProcessGroup join_group() const override;
  void enter_join(std::shared_ptr<detail::JoinContext> context, bool is_first) override;
  void shadow(const detail::JoinRound& round) override;
  void copy_state_from(int source) override;
  void leave_join() noexcept override;

  class Shard;
  void step_shard(const at::Tensor& skip);

  const std::function<void()> before_step_;
  std::shared_ptr<Shard> shard_;
  std::shared_ptr<detail::JoinContext> join_;  // set while in a join
};

namespace detail {

template <class Optimizer, class... Known>
inline constexpr bool is_one_of = (std::is_same_v<Optimizer, Known> || ...);

template <class Optimizer>
inline constexpr bool updates_elements =
    is_one_of<Optimizer, torch::optim::SGD, torch::optim::Adam, torch::optim::AdamW, torch::optim::Adagrad,
              torch::optim::RMSprop, FusedSGD, FusedAdam, FusedAdamW, WithMasterWeights<FusedSGD>,
              WithMasterWeights<FusedAdam>, WithMasterWeights<FusedAdamW>>;

}  // namespace detail

/// An optimizer that shards its state over the ranks of a group (ZeRO stage 1). Each rank keeps one shard of the state,
/// updates the corresponding part of the parameters, and receives the other parts from the other ranks. Use it in place
/// of `Inner`; the results are the same.
///
/// The constructor is collective. It moves the parameters into memory of the group; values, sizes and, for dense
/// parameters, strides stay the same. It throws UsageError on all ranks if a parameter is not on the group's device, is
/// not strided or is listed twice, and MismatchError if the parameters differ between ranks. Pass all parameter groups
/// to the constructor.
///
/// Parameters and gradients must be equal on all ranks when step() is called. DistributedDataParallel ensures this,
/// except for the parameters that its option ignore names: give them an optimizer of their own.
///
/// Change learning rates in param_groups(), as with other optimizers. If a parameter gets different storage later, for
/// example by torch::load, the next step moves its values back. If a parameter's device, dtype or sizes have changed,
/// the next step throws UsageError.
///
/// Not thread-safe. Not movable. The model may outlive the optimizer.
template <class Inner>
class ZeroRedundancyOptimizer : public ZeroRedundancyOptimizerBase {
 public:
  template <class Options>
  ZeroRedundancyOptimizer(std::vector<torch::optim::OptimizerParamGroup> groups, ProcessGroup group, Options options,
                          const ZeroRedundancyOptions& how = {})
      : ZeroRedundancyOptimizer(std::move(groups), {}, std::move(group), std::move(options), how) {}

  template <class Options>
  ZeroRedundancyOptimizer(std::vector<at::Tensor> parameters, ProcessGroup group, Options options,
                          const ZeroRedundancyOptions& how = {})
      : ZeroRedundancyOptimizer({torch::optim::OptimizerParamGroup(std::move(parameters))}, {}, std::move(group),
                                std::move(options), how) {}

  /// Takes named parameters, as from ddp.named_parameters(). Error messages and saved states then contain the names.
  template <class Options>
  ZeroRedundancyOptimizer(const std::vector<std::pair<std::string, at::Tensor>>& parameters, ProcessGroup group,
                          Options options, const ZeroRedundancyOptions& how = {})
      : ZeroRedundancyOptimizer({torch::optim::OptimizerParamGroup(seconds(parameters))}, firsts(parameters),
                                std::move(group), std::move(options), how) {}

 private:
  template <class Options>
  ZeroRedundancyOptimizer(std::vector<torch::optim::OptimizerParamGroup> groups, std::vector<std::string> names,
                          ProcessGroup group, Options options, const ZeroRedundancyOptions& how)
      : ZeroRedundancyOptimizerBase(
            std::move(groups), std::move(names), std::make_unique<Options>(options), std::move(group), how,
            how.shard_by.value_or(detail::updates_elements<Inner> ? ShardBy::kElements : ShardBy::kParameters),
            [options](std::vector<torch::optim::OptimizerParamGroup> shares) {
              return std::make_unique<Inner>(std::move(shares), options);
            },
            [](torch::optim::Optimizer& inner) {
              if constexpr (requires(Inner & optimizer) { optimizer.before_replay(); })
                static_cast<Inner&>(inner).before_replay();
            }) {}

  static std::vector<std::string> firsts(const std::vector<std::pair<std::string, at::Tensor>>& parameters) {
    std::vector<std::string> result;
    for (const auto& [name, tensor] : parameters) result.push_back(name);
    return result;
  }
  static std::vector<at::Tensor> seconds(const std::vector<std::pair<std::string, at::Tensor>>& parameters) {
    std::vector<at::Tensor> result;
    for (const auto& [name, tensor] : parameters) result.push_back(tensor);
    return result;
  }
};

}  // namespace lockstep
