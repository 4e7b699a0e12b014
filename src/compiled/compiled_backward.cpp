#include "compiled/compiled_backward.h"

#include <algorithm>
#include <set>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/torch_version.h"

namespace lockstep::detail {
namespace {

using torch::autograd::variable_list;

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

/// A tensor that backward needs, and its version in forward. The detached tensor shares memory and version with the
/// original, but does not refer to autograd's graph, which refers to it.
struct SavedTensor {
  /// `visible` is the tensor in the same memory that the program can change: `original`, or a result that is a view of
  /// it.
  SavedTensor(const at::Tensor& original, const at::Tensor& visible)
      : tensor(original.detach()), watched(visible.detach()), version(version_of(watched)) {}

  bool has_changed() const { return version_of(watched) != version; }

  at::Tensor tensor, watched;
  uint32_t version;
};

/// Runs the graph of backward.
class CompiledBackward final : public torch::autograd::Node {
 public:
  CompiledBackward(std::shared_ptr<const CompiledDescription> description, const BackwardGraph& backward,
                   std::vector<SavedTensor> saved, c10::Device device, std::shared_ptr<LoadedGraph> graph,
                   torch::autograd::edge_list edges)
      : Node(std::move(edges)),
        description_(std::move(description)),
        backward_(backward),
        device_(device),
        graph_(std::move(graph)),
        saved_(std::move(saved)) {}

  std::string name() const override { return "CompiledBackward"; }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (at::GradMode::is_enabled())
      refuse("backward with create_graph is not possible, because compiled graphs have no second derivatives");
    if (is_released_) refuse("backward ran a second time; pass retain_graph to the first one");
    std::vector<at::Tensor> arguments;
    for (size_t i = 0; i < saved_.size(); ++i) {
      if (saved_[i].has_changed())
        refuse(text(name_of(saved_[i].tensor),
                    " was changed in place between forward and backward; change it after backward"));
      arguments.push_back(saved_[i].tensor);
    }
    for (size_t i = 0; i < gradients.size(); ++i) arguments.push_back(as_compiled(gradients[i], backward_.tangents[i]));
    gradients.clear();
    if (!torch::autograd::get_current_graph_task_keep_graph()) release();
    return distinct(graph_->run(std::move(arguments)));
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    release();
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    throw UsageError(text("CompiledModule ", description_->model, ": ", why));
  }

  /// Graphs also save views of parameters.
  std::string name_of(const at::Tensor& saved) const {
    for (const auto* tensors : {&description_->parameters, &description_->buffers})
      for (const auto& described : *tensors)
        if (described.tensor.is_alias_of(saved)) return text("'", described.name, "'");
    return "an input or output of the model";
  }

  void release() {
    saved_.clear();
    is_released_ = true;
  }

  /// The graph expects the strides that an output has. An output that was not used has no gradient.
  at::Tensor as_compiled(const at::Tensor& gradient, const Tangent& tangent) const {
    const auto options = at::TensorOptions().dtype(tangent.dtype).device(device_);
    if (!gradient.defined()) return at::empty_strided(tangent.sizes, tangent.strides, options).zero_();
    if (gradient.strides() == at::IntArrayRef(tangent.strides) && !gradient.is_conj() && !gradient.is_neg())
      return gradient;
    return at::empty_strided(tangent.sizes, tangent.strides, options).copy_(gradient);
  }

  /// A graph may return one tensor as several gradients. Each parameter needs memory of its own, because optimizers
  /// change gradients in place.
  static variable_list distinct(variable_list gradients) {
    std::set<const void*> storages;
    for (auto& gradient : gradients)
      if (gradient.defined() && !storages.insert(gradient.storage().unsafeGetStorageImpl()).second)
        gradient = gradient.clone();
    return gradients;
  }

  const std::shared_ptr<const CompiledDescription> description_;  // contains the next one
  const BackwardGraph& backward_;
  const c10::Device device_;
  const std::shared_ptr<LoadedGraph> graph_;
  std::vector<SavedTensor> saved_;  // those of backward_; guarded by mutex_ of the base class, like the next one
  bool is_released_ = false;
};

/// Buffers are written when forward ends, so backward gets a copy of their old values.
std::vector<SavedTensor> save(const CompiledDescription& description, const CompiledSizes& compiled,
                              const std::vector<at::Tensor>& arguments, const std::vector<at::Tensor>& results) {
  const auto& written = compiled.forward.written_buffers;
  const auto is_written = [&](size_t argument) {
    const size_t buffer = argument - description.parameters.size();  // a huge number for a parameter
    return std::find(written.begin(), written.end(), buffer) != written.end();
  };
  // The graph returns views of its results as separate tensors, whose versions are not those of the results.
  const auto visible_alias = [&](const at::Tensor& tensor) {
    const auto end = results.begin() + static_cast<ptrdiff_t>(compiled.forward.outputs);
    const auto found =
        std::find_if(results.begin(), end, [&](const at::Tensor& result) { return result.is_alias_of(tensor); });
    return found == end ? tensor : *found;
  };
  std::vector<SavedTensor> saved;
  for (const auto& [is_output, index] : compiled.backward.saved) {
    const auto& tensor = is_output ? results.at(index) : arguments.at(index);
    const auto kept = !is_output && is_written(index) ? tensor.detach().clone() : tensor;
    saved.emplace_back(kept, is_output ? visible_alias(tensor) : kept);
  }
  return saved;
}

}  // namespace

void connect_backward(const std::shared_ptr<const CompiledDescription>& description, size_t sizes,
                      const std::vector<at::Tensor>& arguments, const std::vector<at::Tensor>& results,
                      std::shared_ptr<LoadedGraph> graph) {
  const auto& compiled = description->sizes[sizes];
  torch::autograd::edge_list edges;
  bool is_needed = false;
  for (const size_t index : compiled.backward.gradients) {
    const auto& argument = arguments.at(index);
    edges.push_back(argument.requires_grad() ? torch::autograd::impl::gradient_edge(argument)
                                             : torch::autograd::Edge());
    is_needed = is_needed || argument.requires_grad();
  }
  if (!is_needed) return;
  const auto node =
      make_node<CompiledBackward>(description, compiled.backward, save(*description, compiled, arguments, results),
                                  arguments[0].device(), std::move(graph), std::move(edges));
  for (const auto& tangent : compiled.backward.tangents) torch::autograd::set_history(results.at(tangent.output), node);
}

}  // namespace lockstep::detail
