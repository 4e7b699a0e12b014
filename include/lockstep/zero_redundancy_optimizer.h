#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

#include <lockstep/detail/inner_optimizer.h>
#include <lockstep/distributed_data_parallel.h>
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

/// What is done while backward runs. It needs the wrapper: see the constructors with a DistributedDataParallel. With
/// kGradients and kUpdate, call step() after each backward that is not under no_sync().
enum class Overlap {
  /// Backward averages gradients. step() updates the parameters and all-gathers them, as PyTorch's
  /// ZeroRedundancyOptimizer does (ZeRO stage 1).
  kNone,
  /// Backward averages each gradient for the rank that updates it, which alone keeps it (ZeRO stage 2). The parameters
  /// have no gradients then. step() updates the parameters and all-gathers them. In between, gradients can be clipped
  /// with ZeroRedundancyOptimizer::clip_grad_norm_(), and a GradScaler can be used.
  kGradients,
  /// The same, but the parameters of a bucket are updated and all-gathered as soon as their gradients are averaged.
  /// After backward all parameters are updated; step() only ends the step. Gradients cannot be clipped or scaled. If
  /// the model uses a parameter again after its gradient is complete, backward throws an error of autograd.
  kUpdate,
};

struct ZeroRedundancyOptions {
  /// Default: kElements for optimizers that are known to update each element independently (LibTorch's SGD, Adam,
  /// AdamW, Adagrad and RMSprop, and lockstep's fused optimizers), otherwise kParameters.
  std::optional<ShardBy> shard_by{};
  /// Called at the start of each step, to change gradients on every rank, for example to clip them. In a join, also
  /// called on ranks without inputs, which also call step(). For Overlap::kNone.
  std::function<void()> before_step{};
  Overlap overlap = Overlap::kNone;
  /// Keeps one copy of the parameters for all ranks of the group, in shared memory, so that an updated shard need not
  /// be sent. All ranks must be on one host (backend "shm" or "threads") and must start with equal parameters. With
  /// Overlap::kUpdate the inner optimizer must be FusedAdamW, FusedAdam or FusedSGD, without master weights. Not for
  /// Overlap::kGradients.
  ///
  /// Only step() may change the parameters afterwards: see docs/optimizers.md for loading. If some ranks write to a
  /// parameter and others do not, the next step (or backward) throws MismatchError on all ranks, which names it. This
  /// detects writes that change the tensor's version, as operators in place and collectives do, and replaced memory
  /// (set_data, torch::load). A write through data() or data_ptr() changes the parameter for all ranks unnoticed.
  bool share_parameters = false;
};

namespace detail {
class Shard;
class UpdateStrategy;
struct ZeroUndo;
}  // namespace detail

/// The part of ZeroRedundancyOptimizer that does not depend on the optimizer's class.
class LOCKSTEP_EXPORT ZeroRedundancyOptimizerBase : public torch::optim::Optimizer,
                                                    public Joinable,
                                                    public SkippableStep {
 public:
  ~ZeroRedundancyOptimizerBase() override;

  /// Updates this rank's shard of the parameters, then all-gathers the shards of all ranks. Collective. Throws
  /// UsageError if a parameter has changed its device, dtype or sizes. With Overlap::kNone, the first step (with
  /// gradients that are finite) throws MismatchError on all ranks, before any update, if parameters or gradients differ
  /// between the ranks by more than rounding.
  at::Tensor step(LossClosure closure = nullptr) override;
  /// Collective. `skip` must be equal on all ranks. See SkippableStep; the host waits for the GPU unless the inner
  /// optimizer is a SkippableStep.
  void step_unless(const at::Tensor& skip) override;

  /// With Overlap::kGradients, between backward and step(): scales the gradients of all ranks' shares, as
  /// clip_grad_norm_() does with whole gradients. Returns the norm before scaling. Collective. Does not wait for the
  /// GPU. Throws UsageError with another overlap.
  at::Tensor clip_grad_norm_(double max_norm, const ClipGradNormOptions& options = {});

  /// Returns, on rank `dst`, the state of all ranks combined, as an optimizer without shards would have it, on the CPU.
  /// Returns None on the other ranks. Collective. If a rank failed during a step, the shards may be from different
  /// steps: throws UsageError, or the group's error if the failure is detected later.
  Value consolidated_state_dict(int dst = 0) const;
  /// Loads a complete state, saved with any number of ranks, with or without shards. Not collective: every rank passes
  /// the complete state. Throws UsageError if the state belongs to other parameters or another kind of optimizer.
  void load_state_dict(const Value& state);
  /// consolidated_state_dict(0), for checkpoints (see TrainingState). Collective.
  Value state_dict() const;

  /// Returns this rank's part of the state. The tensors are the optimizer's tensors, not copies. Not collective. Throws
  /// like consolidated_state_dict().
  Value shard_state_dict() const;
  /// Loads the parts of a state that `shards` ranks had. `read` returns one part; with the option map_location =
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

  /// Call before each replay of your own CUDA graph if the inner optimizer is a fused one. CapturedStep calls it
  /// itself.
  void before_replay();

 protected:
  /// The parameters, and the ranks between which they are divided.
  struct Parameters {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    std::vector<std::string> names;  // with a wrapper, empty for parameters that are not in its model
    ProcessGroup group;
    DistributedDataParallelBase* wrapper = nullptr;  // that reduces their gradients
  };
  static Parameters parameters_of(std::vector<std::pair<std::string, at::Tensor>> parameters, ProcessGroup group);
  static Parameters parameters_of(DistributedDataParallelBase& wrapper);
  static Parameters parameters_of(std::vector<torch::optim::OptimizerParamGroup> groups,
                                  DistributedDataParallelBase& wrapper);

  ZeroRedundancyOptimizerBase(Parameters parameters, std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                              const ZeroRedundancyOptions& options, ShardBy shard_by, detail::InnerOptimizer inner);

 private:
  // Joinable. In the list of members, the optimizer follows the wrapper that averages its gradients.
  ProcessGroup join_group() const override;
  void enter_join(std::shared_ptr<detail::JoinContext> context, bool is_first) override;
  void shadow(const detail::JoinRound& round) override;
  void copy_state_from(int source) override;
  void leave_join() noexcept override;

  friend class GradScaler;
  friend struct detail::ZeroUndo;
  /// This rank's share of the gradients; none if the gradients are those of the parameters.
  std::optional<std::vector<at::Tensor>> sharded_gradients() const;
  NamedTensors check(const Parameters& parameters, const ZeroRedundancyOptions& options, ShardBy shard_by,
                     bool is_fused) const;
  void step_shard(const at::Tensor& skip);
  void copy_rates_of(int rank) const;

  const std::function<void()> before_step_;
  const NamedTensors not_reduced_;  // parameters that the wrapper does not reduce, with their names in messages
  const std::shared_ptr<detail::Shard> shard_;
  std::shared_ptr<detail::UpdateStrategy> strategy_;
  std::shared_ptr<detail::JoinContext> join_;  // set while in a join
};

/// An optimizer that shards its state over the ranks of a group (ZeRO). Each rank keeps one shard of the state, updates
/// the corresponding part of the parameters, and receives the other parts from the other ranks. Use it in place of
/// `Inner`; the results are the same.
///
///     lockstep::DistributedDataParallel ddp(model, world);
///     lockstep::ZeroRedundancyOptimizer<lockstep::FusedAdamW> optimizer(ddp, torch::optim::AdamWOptions(1e-3),
///                                                                       {.overlap = lockstep::Overlap::kUpdate});
///
/// The constructor is collective. It moves the parameters into memory of the group; values, sizes and, for dense
/// parameters, strides stay the same. It throws UsageError on all ranks if a parameter is not on the group's device, is
/// not strided, is listed twice, has elements that share memory or was created under InferenceMode, and for a complex
/// parameter with a fused optimizer; MismatchError if the parameters or the options differ between ranks. Pass all
/// parameter groups to the constructor.
///
/// With a wrapper, the optimizer has the parameters of the wrapped model, except those of the wrapper's option ignore,
/// or the groups that are passed. The constructor and step() throw UsageError for a parameter that requires a gradient
/// and that the wrapper does not reduce: use a separate optimizer for it. With an overlap, the optimizer must have all
/// parameters that the wrapper reduces, and the constructor throws UsageError if the wrapper has a comm hook, another
/// optimizer with an overlap, sparse gradients, or one of the options find_unused_parameters, check_finite and
/// reduce_dtype. Wrapper and optimizer must both live as long as backward runs.
///
/// Without a wrapper, parameters and gradients must be equal on all ranks when step() is called.
/// DistributedDataParallel ensures this, except for the parameters that its option ignore names.
///
/// Change learning rates in param_groups(), as with other optimizers. If a parameter gets different storage later, for
/// example by torch::load, the next step moves its values back. If a parameter's device, dtype or sizes have changed,
/// the next step throws UsageError.
///
/// Not thread-safe. Not movable. The model may outlive the optimizer.
template <class Inner>
class ZeroRedundancyOptimizer : public ZeroRedundancyOptimizerBase {
 public:
  /// For the parameters of a wrapped model.
  template <class Options>
  ZeroRedundancyOptimizer(DistributedDataParallelBase& ddp, Options options,
                          const ZeroRedundancyOptions& zero_options = {})
      : ZeroRedundancyOptimizer(parameters_of(ddp), std::move(options), zero_options) {}

  template <class Options>
  ZeroRedundancyOptimizer(std::vector<torch::optim::OptimizerParamGroup> groups, DistributedDataParallelBase& ddp,
                          Options options, const ZeroRedundancyOptions& zero_options = {})
      : ZeroRedundancyOptimizer(parameters_of(std::move(groups), ddp), std::move(options), zero_options) {}

  template <class Options>
  ZeroRedundancyOptimizer(std::vector<at::Tensor> parameters, DistributedDataParallelBase& ddp, Options options,
                          const ZeroRedundancyOptions& zero_options = {})
      : ZeroRedundancyOptimizer({torch::optim::OptimizerParamGroup(std::move(parameters))}, ddp, std::move(options),
                                zero_options) {}

  /// For parameters whose gradients are averaged in another way. Overlap::kNone only.
  template <class Options>
  ZeroRedundancyOptimizer(std::vector<torch::optim::OptimizerParamGroup> groups, ProcessGroup group, Options options,
                          const ZeroRedundancyOptions& zero_options = {})
      : ZeroRedundancyOptimizer(Parameters{std::move(groups), {}, std::move(group)}, std::move(options), zero_options) {
  }

  template <class Options>
  ZeroRedundancyOptimizer(std::vector<at::Tensor> parameters, ProcessGroup group, Options options,
                          const ZeroRedundancyOptions& zero_options = {})
      : ZeroRedundancyOptimizer({torch::optim::OptimizerParamGroup(std::move(parameters))}, std::move(group),
                                std::move(options), zero_options) {}

  /// Takes named parameters. Error messages and saved states then contain the names, as with a wrapper.
  template <class Options>
  ZeroRedundancyOptimizer(std::vector<std::pair<std::string, at::Tensor>> parameters, ProcessGroup group,
                          Options options, const ZeroRedundancyOptions& zero_options = {})
      : ZeroRedundancyOptimizer(parameters_of(std::move(parameters), std::move(group)), std::move(options),
                                zero_options) {}

 private:
  template <class Options>
  ZeroRedundancyOptimizer(Parameters parameters, Options options, const ZeroRedundancyOptions& zero_options)
      : ZeroRedundancyOptimizerBase(
            std::move(parameters), std::make_unique<Options>(options), zero_options,
            zero_options.shard_by.value_or(detail::updates_elements<Inner> ? ShardBy::kElements : ShardBy::kParameters),
            {[options](std::vector<torch::optim::OptimizerParamGroup> shares) {
               return std::make_unique<Inner>(std::move(shares), options);
             },
             [](torch::optim::Optimizer& inner) {
               if constexpr (requires(Inner & optimizer) { optimizer.before_replay(); })
                 static_cast<Inner&>(inner).before_replay();
             },
             detail::is_fused<Inner>}) {}
};

}  // namespace lockstep
