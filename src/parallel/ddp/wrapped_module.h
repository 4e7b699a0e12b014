#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "parallel/ddp/reducer.h"

namespace lockstep {

/// A module and its tensors at the time of wrapping. Not thread-safe.
class WrappedModule {
 public:
  /// Excludes the tensors named in `ignored`. Throws UsageError for a name that the module does not have.
  WrappedModule(std::shared_ptr<torch::nn::Module> module, const std::vector<std::string>& ignored);

  torch::nn::Module& module() const { return *module_; }

  /// Each tensor once, under its first name, even if it is registered under several names.
  const std::vector<NamedParameter>& parameters() const { return parameters_; }
  const std::vector<NamedParameter>& buffers() const { return buffers_; }
  std::vector<NamedParameter> trained() const;
  /// Names of the trained parameters whose gradients are sparse: weights of embeddings with the option sparse, and
  /// parameters that the options name. Empty if the options densify them. Throws UsageError for a name that the module
  /// does not have.
  std::vector<std::string> sparse_parameters(const DistributedDataParallelOptions& options) const;
  /// Includes the ignored parameters.
  std::vector<NamedParameter> all_parameters() const;

  /// Describes how the module changed since construction, for an error message: a parameter or buffer was added,
  /// removed or replaced, a parameter was moved, or a frozen parameter is trained now. Empty if nothing changed.
  /// Costs a few nanoseconds per tensor.
  std::string describe_change() const;

 private:
  /// Properties of a parameter that must not change after wrapping.
  struct Form {
    explicit Form(const at::Tensor& tensor);
    bool matches(const at::Tensor& tensor) const;
    std::string describe() const;

    std::vector<int64_t> sizes;
    c10::ScalarType dtype;
    c10::Device device;
  };

  const std::shared_ptr<torch::nn::Module> module_;
  std::vector<NamedParameter> parameters_;          // constant after construction
  std::vector<NamedParameter> buffers_;             // constant after construction
  std::vector<Form> as_wrapped_;                    // constant after construction
  std::vector<bool> requires_grad_;                 // constant after construction
  std::vector<const c10::TensorImpl*> registered_;  // constant after construction: all registered tensors, in order
};

}  // namespace lockstep
