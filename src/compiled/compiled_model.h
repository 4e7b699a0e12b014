#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include "compiled/description.h"
#include "compiled/loaded_graph.h"

namespace lockstep::detail {

/// The graphs of a compiled file, and the tensors that they compute with.
class CompiledModel {
 public:
  CompiledModel(std::string path, CompiledDescription description);

  const CompiledDescription& description() const { return *description_; }
  /// Runs the graph for these inputs, as CompiledModuleImpl::forward() says.
  c10::IValue run(std::vector<at::Tensor> inputs, bool is_training);

 private:
  /// What a graph takes for granted of a parameter or buffer.
  struct Form {
    std::vector<int64_t> sizes, strides;
    c10::ScalarType dtype;
  };
  struct Graphs {
    std::shared_ptr<LoadedGraph> forward, backward, evaluation;  // null until they are needed
  };

  [[noreturn]] void refuse(const std::string& why) const;
  c10::Device check_tensors();
  void check_frozen() const;
  size_t find_sizes(const std::vector<at::Tensor>& inputs, bool is_training) const;
  void check_inputs(const std::vector<at::Tensor>& inputs, const std::vector<CompiledInput>& compiled,
                    c10::Device device, bool is_training) const;
  std::string list_sizes(bool is_training) const;
  size_t number_of_inputs(size_t sizes, bool is_training) const;
  LoadedGraph& load(std::shared_ptr<LoadedGraph>& graph, const std::string& name, c10::Device device);
  std::vector<at::Tensor> arguments_with(const std::vector<at::Tensor>& inputs) const;
  void write_buffers(const ForwardGraph& graph, const std::vector<at::Tensor>& results) const;

  const std::string path_;
  const std::shared_ptr<const CompiledDescription> description_;
  std::vector<DescribedTensor> tensors_;  // parameters, then buffers
  std::vector<Form> forms_;               // of the tensors
  c10::Device device_;                    // of the loaded graphs
  std::vector<Graphs> graphs_;            // for each element of description_->sizes
};

}  // namespace lockstep::detail
