#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>

#include <lockstep/compiled_module.h>
#include <lockstep/model_adapters.h>
#include <lockstep/value.h>

namespace lockstep::detail {

/// How a result of the model is composed of the tensors that a graph returns.
struct Structure {
  enum class Kind { kNone, kTensor, kTuple, kList, kDict };

  /// Returns the result that has these tensors.
  c10::IValue compose(const std::vector<at::Tensor>& tensors) const;

  Kind kind = Kind::kNone;
  size_t tensor = 0;                                          // index of a kTensor
  std::vector<std::pair<std::string, Structure>> elements{};  // the names of those of a kDict
};

/// The common part of forward and evaluation. A graph takes parameters, buffers and inputs, in this order. It returns
/// the tensors of the result, then the new values of the written buffers, then what backward needs.
struct ForwardGraph {
  std::string name;
  size_t outputs = 0;
  Structure structure;
  std::vector<size_t> written_buffers;  // indices of buffers
};

/// A value that backward gets from forward.
struct SavedValue {
  bool is_output;  // else an argument of forward
  size_t index;
};

/// The gradient of an output, which backward gets after the saved values.
struct Tangent {
  size_t output;
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype;
};

struct BackwardGraph {
  std::string name;
  std::vector<SavedValue> saved;
  std::vector<Tangent> tangents;
  std::vector<size_t> gradients;  // for each result of the graph the argument of forward whose gradient it is
};

/// The graphs for one set of input sizes.
struct CompiledSizes {
  ForwardGraph forward;
  BackwardGraph backward;
  ForwardGraph evaluation;
  size_t evaluation_inputs = 0;  // the first ones of the inputs
};

/// A tensor of the model with its name.
struct DescribedTensor {
  std::string name;
  at::Tensor tensor;
  bool requires_grad = false;
  bool is_persistent = true;  // in the state_dict
};

/// The content of a compiled file, except for its code.
struct CompiledDescription {
  std::string model;  // the name of the class in Python
  std::string torch;  // "2.11.0"
  c10::DeviceType device = c10::kCPU;
  std::string architecture;               // "x86_64"
  std::string compute_capability;         // "9.0"; empty for CPUs
  std::vector<std::string> instructions;  // names of /proc/cpuinfo
  std::string matmul_precision;           // of float32, as torch.set_float32_matmul_precision names it: "highest"
  bool has_loss = false;
  bool normalizes_batches = false;                 // has a BatchNorm layer
  std::vector<DescribedTensor> parameters;         // in the order of the graphs' arguments
  std::vector<DescribedTensor> buffers;            // likewise
  NamedTensors named_parameters;                   // in the order of Python; tied parameters with all of their names
  NamedTensors named_buffers;                      // those of the state_dict
  std::vector<std::vector<CompiledInput>> inputs;  // of each element of `sizes`
  std::vector<CompiledSizes> sizes;
};

/// Reads what `lockstep compile` has written, the version of the format included. Throws CheckpointError, which begins
/// with `path`, if it is something else. Pure.
CompiledDescription read_description(const std::string& path, const Value& file);

}  // namespace lockstep::detail
