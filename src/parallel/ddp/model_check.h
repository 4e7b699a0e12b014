#pragma once

#include <optional>
#include <string>
#include <vector>

#include <lockstep/ddp_options.h>
#include <lockstep/process_group.h>

#include "parallel/ddp/reducer.h"
#include "parallel/ddp/wrapped_module.h"

namespace lockstep {

/// Compares the bits of the tensors over all ranks. Collective. If a tensor differs, throws MismatchError on every
/// rank; the error names the first such tensor and the ranks that differ from rank 0.
void check_equal(const std::vector<NamedParameter>& tensors, const ProcessGroup& group);

/// One parameter, buffer or option, in the form that the ranks compare.
struct ModelFact {
  std::string name;         // "parameter 'fc.weight'"
  std::string description;  // "[10, 84] Float"

  friend bool operator==(const ModelFact&, const ModelFact&) = default;
};

/// Describes the first difference between two ranks' models for an error message; empty if there is none.
std::string first_difference(const std::vector<ModelFact>& own, const std::vector<ModelFact>& other, int other_rank);

/// Throws UsageError if some rank's model cannot be trained by this group with these options, or if `device` is set and
/// is not the group's device. Collective; throws on all ranks or on none.
void check_trainable(const WrappedModule& model, const DistributedDataParallelOptions& options,
                     const std::optional<c10::Device>& device, const ProcessGroup& group);

/// Throws MismatchError, naming the first difference, unless all ranks have the same model and the same options.
/// Collective; throws on all ranks or on none.
void check_same_model(const WrappedModule& model, const DistributedDataParallelOptions& options,
                      const ProcessGroup& group);

}  // namespace lockstep
