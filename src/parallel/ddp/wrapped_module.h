#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "parallel/ddp/reducer.h"

namespace lockstep {

/// The tensors of a module as they were when it was wrapped. Not thread-safe.
class WrappedModule {
 public:
  /// Tensors whose names are in `ignored` are left alone. UsageError for a name that the module does not have.
  WrappedModule(std::shared_ptr<torch::nn::Module> module, const std::vector<std::string>& ignored);

  torch::nn::Module& module() const { return *module_; }

  /// Each tensor once, under its first name, though it may be registered under several.
  const std::vector<NamedParameter>& parameters() const { return parameters_; }
  const std::vector<NamedParameter>& buffers() const { return buffers_; }
  std::vector<NamedParameter> trained() const;
  /// Those that are ignored, too.
  std::vector<NamedParameter> all_parameters() const;

  /// What happened to the parameters since, for an error: one was added, replaced, moved, or trains no longer. Empty
  /// when nothing did. Costs a few nanoseconds a parameter.
  std::string describe_change() const;

  /// Differs, most likely, when an optimizer has stepped since.
  uint64_t cheap_fingerprint() const;

 private:
  /// What must not change under the wrapper.
  struct Form {
    explicit Form(const at::Tensor& tensor);
    bool is_that_of(const at::Tensor& tensor) const;
    std::string describe() const;

    std::vector<int64_t> sizes;
    c10::ScalarType dtype;
    c10::Device device;
  };

  const std::shared_ptr<torch::nn::Module> module_;
  std::vector<NamedParameter> parameters_;          // constant after construction
  std::vector<NamedParameter> buffers_;             // constant after construction
  std::vector<Form> as_wrapped_;                    // constant after construction
  std::vector<bool> trains_;                        // constant after construction
  std::vector<const c10::TensorImpl*> registered_;  // constant after construction: all parameters, as they stand
};

}  // namespace lockstep
