#pragma once

#include <concepts>
#include <map>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/export.h>
#include <lockstep/state_traits.h>
#include <lockstep/value.h>

namespace lockstep {

/// Returns the parameters and buffers of a module by name, in the order of Python's state_dict(). The tensors share
/// memory with the module. Not collective.
LOCKSTEP_EXPORT Value state_dict(const torch::nn::Module& module);

struct LoadStateDictOptions {
  bool strict = true;  ///< Missing and unexpected keys are errors. Wrong sizes always are.
};

/// Keys that only one side has.
struct IncompatibleKeys {
  std::vector<std::string> missing{};     ///< in the module, but not in the dict
  std::vector<std::string> unexpected{};  ///< in the dict, but not in the module
};

/// Copies tensors by name into the parameters and buffers of a module, which keep their device and dtype. `dict` is a
/// state_dict as Python has it, or nested dicts as load_checkpoint() returns for files of torch::save and TorchScript.
/// A prefix "module." on all keys, as in models that were saved through Python's DistributedDataParallel, is ignored.
///
/// Not collective. Throws UsageError, and changes nothing, if the keys differ (unless not strict) or sizes differ; the
/// message lists all of them.
LOCKSTEP_EXPORT IncompatibleKeys load_state_dict(torch::nn::Module& module, const Value& dict,
                                                 const LoadStateDictOptions& options = {});

/// Returns all tensors in nested dicts, with names joined by dots: {"fc": {"weight": t}} has "fc.weight". Values that
/// are neither tensors nor dicts are left out.
LOCKSTEP_EXPORT std::map<std::string, at::Tensor> named_tensors(const Value& dict);

template <std::derived_from<torch::nn::Module> T>
requires(!detail::HasStateDict<T>) struct StateTraits<T> {
  static Value save(const T& module) { return state_dict(module); }
  static void load(T& module, const Value& value) { load_state_dict(module, value); }
};

}  // namespace lockstep
