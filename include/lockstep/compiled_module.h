#pragma once

#include <concepts>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <torch/nn/pimpl.h>

#include <lockstep/export.h>
#include <lockstep/model_adapters.h>

namespace lockstep {

namespace detail {

class CompiledModel;

}  // namespace detail

/// An input for which a model was compiled.
struct CompiledInput {
  std::vector<int64_t> sizes;
  c10::ScalarType dtype;
  bool requires_grad;  ///< backward computes its gradient
};

/// A model that `lockstep compile` has compiled in Python, forward and backward, as a torch::nn::Module, which all of
/// lockstep accepts: DistributedDataParallel, optimizers, GradScaler, CapturedStep, checkpoints. Parameters and buffers
/// have the names that they have in Python, and the values that they had there.
///
///   lockstep::CompiledModule net("gpt.pt2", world.device());
///   lockstep::DistributedDataParallel ddp(net, world);
///   auto loss = ddp(tokens, targets).toTensor();     // compiled with its loss
///   loss.backward();
///
/// train() and eval() select the compiled graph. In training mode a model that was compiled with a loss takes its
/// inputs and the target, and returns the loss. In evaluation mode it takes the inputs alone, and returns the model's
/// output, through which no gradients flow.
///
/// The file is native code, which runs with the rights of the program: load only files that you trust. It works only
/// with the LibTorch release, the kind of device, and the processor's instructions or the GPU's compute capability that
/// it was compiled for. CompiledModule needs LibTorch 2.11 or later.
///
/// Not thread-safe. Has no clone(), so DataParallel does not accept it.
class LOCKSTEP_EXPORT CompiledModuleImpl : public detail::AdoptedTensors {
 public:
  /// Loads the file on the device; default: the CPU, or the calling thread's current GPU if the model was compiled for
  /// GPUs. `to(device)` moves it to another GPU later. The file must stay where it is: graphs are loaded from it when
  /// they are first called.
  ///
  /// Throws UsageError, with the reason and the remedy, if this LibTorch or this machine cannot run the model;
  /// CheckpointError if the file is damaged or was not written by `lockstep compile`.
  explicit CompiledModuleImpl(const std::string& path, std::optional<c10::Device> device = {});
  ~CompiledModuleImpl() override;

  /// Runs the graph for inputs of these sizes. Returns a tensor, or the tuple, list or dict of tensors that the model
  /// returns in Python.
  ///
  /// Throws UsageError, and computes nothing, for inputs of other sizes, dtypes or devices than the model was compiled
  /// for; if parameters were frozen, or converted to another dtype, after it was compiled; and if autocast is enabled,
  /// which is fixed when a model is compiled. Backward with create_graph throws UsageError.
  template <std::convertible_to<at::Tensor>... Tensors>
  c10::IValue forward(const Tensors&... inputs) {
    return run({at::Tensor(inputs)...});
  }

  /// The inputs for which the model was compiled: for each set of sizes the inputs of training mode, with the target.
  const std::vector<std::vector<CompiledInput>>& inputs() const;
  /// Whether the model was compiled with a loss.
  bool has_loss() const;

  bool normalizes_batches() const override;

 private:
  explicit CompiledModuleImpl(std::unique_ptr<detail::CompiledModel> model);
  c10::IValue run(std::vector<at::Tensor> inputs);

  const std::unique_ptr<detail::CompiledModel> model_;
};

/// A shared reference to a CompiledModuleImpl, like the classes that TORCH_MODULE declares.
class CompiledModule : public torch::nn::ModuleHolder<CompiledModuleImpl> {
 public:
  using torch::nn::ModuleHolder<CompiledModuleImpl>::ModuleHolder;
  using Impl = CompiledModuleImpl;

  /// ModuleHolder's own does not know the result of a forward that is a template.
  template <std::convertible_to<at::Tensor>... Tensors>
  c10::IValue operator()(const Tensors&... inputs) {
    return impl_->forward(inputs...);
  }
};

}  // namespace lockstep
