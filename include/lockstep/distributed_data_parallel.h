#pragma once

#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <lockstep/comm_hook.h>
#include <lockstep/ddp_logging_data.h>
#include <lockstep/ddp_options.h>
#include <lockstep/detail/ddp_state.h>
#include <lockstep/detail/placed_arguments.h>
#include <lockstep/export.h>
#include <lockstep/join.h>
#include <lockstep/model_adapters.h>
#include <lockstep/process_group.h>
#include <lockstep/tensors_in.h>

namespace lockstep {

/// The part of DistributedDataParallel that does not depend on the module's class.
class LOCKSTEP_EXPORT DistributedDataParallelBase : public Joinable {
 public:
  /// Return each parameter once, even if several modules share it. Pass these to the optimizer.
  std::vector<at::Tensor> parameters() const;
  NamedTensors named_parameters() const;
  /// The ranks that train the model.
  const ProcessGroup& process_group() const;
  void train(bool on = true);
  void eval();

  /// Skips gradient averaging while the returned guard exists: { auto guard = ddp.no_sync(); loss.backward(); }.
  /// Gradients accumulate on this rank. The first backward after the guard is destroyed averages the accumulated
  /// gradients.
  [[nodiscard]] detail::NoSync no_sync() const;

  /// Weights this rank's gradients by the number of samples in its batch, so that the average is the mean over all
  /// samples, as in one process on the concatenated batch. Applies to every backward, including those under no_sync,
  /// until the next call. 0 means an empty batch: this rank's gradients count as zeros.
  ///
  /// Collective: every rank calls it equally often. Returns without waiting. Throws UsageError unless the weight is
  /// finite and 0 or more, and for a model with SyncBatchNorm layers. If the weights of all ranks are 0, backward
  /// throws UsageError on a CPU; on a GPU the gradients are zeros.
  void set_batch_weight(double samples);

  /// Runs `loop`, which may have a different number of iterations on each rank. Collective; see lockstep::join.
  void join(const std::function<void()>& loop, const JoinOptions& options = {});

  /// Uses `hook` to reduce buckets from now on. Not collective, but register the same hook on all ranks. Throws
  /// UsageError if this wrapper already has a hook.
  void register_comm_hook(CommHook hook);
  /// Sets the option static_graph. Throws UsageError after the first backward.
  void set_static_graph();

  /// Copy rank 0's buffers, or its parameters and buffers, to all ranks. Collective.
  void sync_buffers();
  void sync_parameters_and_buffers();
  /// Compares the parameters of all ranks. If they are not bitwise equal, throws a MismatchError that names the first
  /// parameter that differs, on every rank. Collective.
  void check_replicas() const;

  /// Returns the current buckets. After the first backward, buckets follow the order in which rank 0's gradients
  /// arrived.
  BucketPlan bucket_plan() const;
  DdpLoggingData logging_data() const;
  /// Writes the last steps of all ranks (at most 64) to a file on rank 0, in a format that Perfetto opens: computation,
  /// bucket reductions and waiting times. Collective. Throws SystemError on rank 0 if the file cannot be written.
  void write_trace(const std::string& path) const;
  /// Returns one line for logs.
  std::string to_string() const;

 protected:
  DistributedDataParallelBase(std::shared_ptr<torch::nn::Module> module, ProcessGroup group,
                              const DistributedDataParallelOptions& options);

  void before_forward() const;
  void after_forward(const std::vector<at::Tensor>& outputs) const;
  const std::optional<c10::Device>& input_device() const;
  const std::optional<c10::Device>& output_device() const;

 private:
  // Joinable
  ProcessGroup join_group() const override;
  void enter_join(std::shared_ptr<detail::JoinContext> context, bool is_first) override;
  void shadow(const detail::JoinRound& round) override;
  void copy_state_from(int source) override;
  void leave_join() noexcept override;

  friend detail::DdpState& detail::ddp_state(const DistributedDataParallelBase& ddp);

  std::shared_ptr<detail::DdpState> replica_;
};

LOCKSTEP_EXPORT std::ostream& operator<<(std::ostream& out, const DistributedDataParallelBase& ddp);

/// Wraps a model for data-parallel training. The ranks of the group train it as one process would on the concatenated
/// batch.
///
/// The constructor is collective. It checks that every rank has the same model (MismatchError names the first
/// difference) and copies rank 0's parameters and buffers to all ranks. It throws UsageError on all ranks if a
/// parameter is not on the group's device or no parameter requires a gradient.
///
/// Each `loss.backward()` is collective. When it returns, `.grad()` of every parameter is the mean over the ranks: do
/// not divide by the world size again. On a GPU the reduction may still be running; later work on the current stream
/// sees the mean.
///
/// Gradients are averaged whether you call the wrapper's forward or the module's own, because the hooks are on the
/// parameters. Only the wrapper's forward broadcasts buffers and checks the model: it throws UsageError if a parameter
/// was added, replaced or moved after wrapping. It also throws UsageError if the last backward was aborted by an
/// exception.
///
/// Parameters may be frozen and trained again between steps (requires_grad_). A frozen parameter takes no part in a
/// backward: it keeps its gradient, and nothing is expected of it. If all are frozen, backward does not communicate.
/// All ranks must freeze the same parameters: backward throws MismatchError on every rank otherwise, on a GPU some
/// steps later. A parameter that is frozen when the model is wrapped is not reduced and must stay frozen.
///
/// A model is a module, a TorchScript module, or a function with a list of parameters:
///
///   lockstep::DistributedDataParallel ddp(torch::jit::load("model.pt"), world);      // calls return c10::IValue
///   lockstep::DistributedDataParallel ddp({{"weight", weight}, {"bias", bias}}, [&](torch::Tensor input) {...},
///   world);
///
/// By default `.grad()` is memory of the wrapper (see gradient_as_bucket_view). Read and modify it freely, but do not
/// keep it beyond the next backward.
///
/// Not thread-safe, like the module that it wraps. Movable. Shares ownership of the module, which may outlive the
/// wrapper.
template <class Module>
class DistributedDataParallel : public DistributedDataParallelBase {
  static_assert(!torch::detail::is_module_holder<Module>::value,
                "Module is a module holder (TORCH_MODULE): write DistributedDataParallel ddp(net, world), or "
                "DistributedDataParallel<NetImpl> with the class that the holder holds.");

 public:
  DistributedDataParallel(std::shared_ptr<Module> module, ProcessGroup group,
                          const DistributedDataParallelOptions& options = {})
      : DistributedDataParallelBase(module, std::move(group), options), module_(std::move(module)) {}

  DistributedDataParallel(const torch::nn::ModuleHolder<Module>& module, ProcessGroup group,
                          const DistributedDataParallelOptions& options = {})
      : DistributedDataParallel(module.ptr(), std::move(group), options) {}

  DistributedDataParallel(
      const torch::jit::Module& script, ProcessGroup group,
      const DistributedDataParallelOptions& options = {}) requires(std::is_same_v<Module, ScriptModule>)
      : DistributedDataParallel(std::make_shared<ScriptModule>(script), std::move(group), options) {}

  template <class Function>
  DistributedDataParallel(
      const NamedTensors& parameters, Function function, ProcessGroup group,
      const DistributedDataParallelOptions& options = {}) requires(std::is_same_v<Module, FunctionModule<Function>>)
      : DistributedDataParallel(std::make_shared<Module>(parameters, std::move(function)), std::move(group), options) {}

  /// Calls the module's forward and returns its result, by value: a reference could refer to a copy of an argument that
  /// was made for device_ids. In training mode with gradients enabled it is collective if it broadcasts buffers or
  /// checks replicas.
  template <class... Args>
  auto forward(Args&&... args) {
    before_forward();
    if (!input_device())
      return finish([&]() -> decltype(auto) { return module_->forward(std::forward<Args>(args)...); });
    std::tuple<detail::Placed<Args>...> placed(detail::place(std::forward<Args>(args), *input_device())...);
    return finish([&]() -> decltype(auto) {
      return std::apply([&](auto&... arg) -> decltype(auto) { return module_->forward(std::forward<Args>(arg)...); },
                        placed);
    });
  }

  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  const std::shared_ptr<Module>& module() const { return module_; }
  Module* operator->() const { return module_.get(); }

 private:
  template <class Forward>
  auto finish(const Forward& run) {
    if constexpr (std::is_void_v<decltype(run())>) {
      run();
      after_forward({});
    } else {
      auto result = run();
      note_outputs(result);
      if (output_device())
        TensorsIn<decltype(result)>::visit(result, [&](at::Tensor& tensor) { tensor = tensor.to(*output_device()); });
      return result;
    }
  }

  template <class Value>
  void note_outputs(const Value& result) const {
    std::vector<at::Tensor> outputs;
    TensorsIn<Value>::visit(const_cast<Value&>(result), [&](at::Tensor& tensor) { outputs.push_back(tensor); });
    after_forward(outputs);
  }

  std::shared_ptr<Module> module_;
};

template <class Module>
DistributedDataParallel(const torch::nn::ModuleHolder<Module>&, ProcessGroup, const DistributedDataParallelOptions&)
    -> DistributedDataParallel<Module>;
template <class Module>
DistributedDataParallel(const torch::nn::ModuleHolder<Module>&, ProcessGroup) -> DistributedDataParallel<Module>;
DistributedDataParallel(const torch::jit::Module&, ProcessGroup, const DistributedDataParallelOptions&)
    ->DistributedDataParallel<ScriptModule>;
DistributedDataParallel(const torch::jit::Module&, ProcessGroup)->DistributedDataParallel<ScriptModule>;
template <class Function>
DistributedDataParallel(const NamedTensors&, Function, ProcessGroup, const DistributedDataParallelOptions&)
    -> DistributedDataParallel<FunctionModule<Function>>;
template <class Function>
DistributedDataParallel(const NamedTensors&, Function, ProcessGroup)
    -> DistributedDataParallel<FunctionModule<Function>>;

}  // namespace lockstep
