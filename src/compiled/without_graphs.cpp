// Compiled instead of the classes that load graphs if LibTorch is older than 2.11. The constructor throws UsageError.

#include <torch/version.h>

#include <lockstep/compiled_module.h>
#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {
namespace detail {

class CompiledModel {};

}  // namespace detail

CompiledModuleImpl::CompiledModuleImpl(const std::string& path, std::optional<c10::Device>)
    : AdoptedTensors("CompiledModule", {}, {}) {
  throw UsageError(text(path, ": compiled models need LibTorch 2.11 or later, and this lockstep was built with ",
                        TORCH_VERSION,
                        "; train the model from its TorchScript file instead (ScriptModule), or build "
                        "lockstep with --torch wheel"));
}

CompiledModuleImpl::~CompiledModuleImpl() = default;

const std::vector<std::vector<CompiledInput>>& CompiledModuleImpl::inputs() const {
  static const std::vector<std::vector<CompiledInput>> none;
  return none;
}

bool CompiledModuleImpl::has_loss() const {
  return false;
}

c10::IValue CompiledModuleImpl::run(std::vector<at::Tensor>) {
  return {};
}

bool CompiledModuleImpl::normalizes_batches() const {
  return false;
}

}  // namespace lockstep
