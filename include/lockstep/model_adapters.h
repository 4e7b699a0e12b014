#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <lockstep/export.h>
#include <lockstep/tensors_in.h>

namespace lockstep {

/// Tensors and their names, as DistributedDataParallel::named_parameters() returns them.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

namespace detail {

/// A module whose parameters and buffers exist already. Names may contain dots. Throws UsageError if a name occurs
/// twice, a tensor is undefined, or a parameter is not a leaf of the autograd graph.
class LOCKSTEP_EXPORT AdoptedTensors : public torch::nn::Module {
 public:
  /// Whether the model has BatchNorm layers, which convert_sync_batchnorm() cannot reach.
  virtual bool normalizes_batches() const;

 protected:
  AdoptedTensors(std::string name, const NamedTensors& parameters, const NamedTensors& buffers);
};

}  // namespace detail

/// A TorchScript module as a torch::nn::Module, which all of lockstep accepts: DistributedDataParallel, optimizers,
/// checkpoints. Parameters and buffers are those of the script, under the same names as in Python. The two share all
/// tensors and the training mode.
///
/// Not thread-safe. Has no clone(), so DataParallel does not accept it.
class LOCKSTEP_EXPORT ScriptModule : public detail::AdoptedTensors {
 public:
  explicit ScriptModule(torch::jit::Module module);

  /// Calls the script's forward. A script may assign new tensors to its buffers; their values are then copied into the
  /// old tensors, which stay registered. Throws UsageError if the script's forward or the program replaced a parameter,
  /// or gave a buffer another size.
  template <class... Args>
  c10::IValue forward(Args&&... args) {
    std::vector<c10::IValue> inputs;
    (inputs.emplace_back(std::forward<Args>(args)), ...);
    return run(std::move(inputs));
  }

  void train(bool on = true) override;

  const torch::jit::Module& script() const { return module_; }

 private:
  /// A tensor of the script, and the attribute that holds it.
  struct Attribute {
    std::string name;
    c10::intrusive_ptr<c10::ivalue::Object> owner;
    size_t slot;
    at::Tensor tensor;
    bool is_parameter;
    bool is_assigned;  // the script's forward assigns to it
  };

  static std::vector<Attribute> attributes_of(const torch::jit::Module& module);
  ScriptModule(torch::jit::Module module, std::vector<Attribute> attributes);
  c10::IValue run(std::vector<c10::IValue> inputs);
  void keep_tensors();

  torch::jit::Module module_;
  const std::vector<Attribute> attributes_;
};

/// A function of parameters that belong to no module, as a torch::nn::Module. See DistributedDataParallel.
template <class Function>
class FunctionModule : public detail::AdoptedTensors {
 public:
  FunctionModule(const NamedTensors& parameters, Function function, const NamedTensors& buffers = {})
      : AdoptedTensors("FunctionModule", parameters, buffers), function_(std::move(function)) {}

  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    return function_(std::forward<Args>(args)...);
  }

 private:
  Function function_;
};

namespace detail {

/// Returns the value with every tensor replaced by function(tensor). Looks into tuples, lists and dicts.
LOCKSTEP_EXPORT c10::IValue with_each_tensor(c10::IValue value, const std::function<void(at::Tensor&)>& function);

}  // namespace detail

template <>
struct TensorsIn<c10::IValue> {
  static constexpr bool kAny = true;
  template <class Visit>
  static void visit(c10::IValue& value, const Visit& function) {
    value = detail::with_each_tensor(std::move(value), [&](at::Tensor& tensor) { function(tensor); });
  }
};

}  // namespace lockstep
