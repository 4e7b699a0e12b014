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

#include <lockstep/export.h>
#include <lockstep/fused_optimizers.h>
#include <lockstep/join.h>
#include <lockstep/optimizer_state.h>
#include <lockstep/process_group.h>
#include <lockstep/shard_plan.h>

namespace lockstep {

struct ZeroRedundancyOptions {
  /// By elements where the optimizer is known to allow it (LibTorch's SGD, Adam, AdamW, Adagrad and RMSprop, and the
  /// fused ones), else by parameters.
  std::optional<ShardBy> shard_by{};
  /// Called by each step before it: what is to be done to gradients on every rank, as clipping, also on those
  /// that step in a join without inputs.
  std::function<void()> before_step{};
};

/// What ZeroRedundancyOptimizer is, whatever the optimizer's class.
class LOCKSTEP_EXPORT ZeroRedundancyOptimizerBase : public torch::optim::Optimizer, public Joinable {
 public:
  ~ZeroRedundancyOptimizerBase() override;

  /// Collective: this rank steps its share of the parameters, then every rank takes the others'.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// The state of all ranks put together, on rank `dst`, as an optimizer that is not sharded would have it, and on the
  /// CPU; empty on the others. Collective. After a step in which a rank was lost, so that shares may be of different
  /// steps, it throws UsageError, or the group's error where that shows later.
  OptimizerState consolidated_state_dict(int dst = 0) const;
  /// Goes on from a state of any number of ranks, sharded or not. Not collective: every rank has all of it.
  void load_state_dict(const OptimizerState& state);

  /// Each rank knows a part only, and these are no collectives: they throw UsageError that says what to call instead.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  /// Bytes that this rank's share of the state takes up. Copies it to find out.
  int64_t state_bytes() const;

  /// With a CUDA graph of your own, and a fused optimizer inside; CapturedStep calls it by itself.
  void before_replay();

  // Joinable: list the optimizer behind the wrapper whose gradients it steps by.
  ProcessGroup join_group() const override;
  void enter_join(std::shared_ptr<JoinContext> context, bool is_first) override;
  void shadow(const JoinRound& round) override;
  void take_state_from(int source) override;
  void leave_join() noexcept override;

 protected:
  using Make =
      std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<torch::optim::OptimizerParamGroup> groups)>;

  ZeroRedundancyOptimizerBase(std::vector<torch::optim::OptimizerParamGroup> groups, std::vector<std::string> names,
                              std::unique_ptr<torch::optim::OptimizerOptions> defaults, ProcessGroup group,
                              const ZeroRedundancyOptions& options, ShardBy shard_by, const Make& make,
                              void (*before_replay)(torch::optim::Optimizer&));

 private:
  class Shard;

  const std::function<void()> before_step_;
  std::shared_ptr<Shard> shard_;
  std::shared_ptr<JoinContext> join_;  // while in one
};

namespace detail {

template <class Optimizer, class... Known>
inline constexpr bool is_one_of = (std::is_same_v<Optimizer, Known> || ...);

template <class Optimizer>
inline constexpr bool updates_elements =
    is_one_of<Optimizer, torch::optim::SGD, torch::optim::Adam, torch::optim::AdamW, torch::optim::Adagrad,
              torch::optim::RMSprop, FusedSGD, FusedAdam, FusedAdamW>;

}  // namespace detail

/// An optimizer whose state is divided between the ranks of a group: each keeps a part of it, updates that part of the
/// parameters, and takes the rest from the others. Takes the place of `Inner`, with the same results.
///
/// The gradients must be equal on all ranks when step() is called, as DistributedDataParallel leaves them. Making one
/// is collective and moves the parameters into memory of the group, in which they keep their values, sizes and, where
/// they are dense, strides. One that is given other memory later, as torch::load does, comes back at the next step with
/// its values; one that has changed its device, dtype or sizes is a UsageError. Parameters must be on the group's
/// device. All groups of parameters are given at once. Learning rates are changed in param_groups(), as ever.
///
/// Not thread-safe. Not movable. The model may outlive it.
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

  /// With names, which errors then tell and states keep: ddp.named_parameters().
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
            [&](std::vector<torch::optim::OptimizerParamGroup> shares) {
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
