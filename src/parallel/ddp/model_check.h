#pragma once

#include <optional>
#include <string>
#include <vector>

#include <lockstep/ddp_options.h>
#include <lockstep/process_group.h>

#include "parallel/ddp/reducer.h"
#include "parallel/ddp/wrapped_module.h"

namespace lockstep {

/// Collective. MismatchError on every rank, naming the first tensor that differs and the ranks that differ from rank 0,
/// unless all ranks hold the same bits.
void check_equal(const std::vector<NamedParameter>& tensors, const ProcessGroup& group);

/// One parameter, buffer or option as the ranks compare it.
struct ModelFact {
  std::string name;         // "parameter 'fc.weight'"
  std::string description;  // "[10, 84] Float"

  friend bool operator==(const ModelFact&, const ModelFact&) = default;
};

/// How the first difference between two ranks' models reads; empty when there is none.
std::string first_difference(const std::vector<ModelFact>& mine, int my_rank, const std::vector<ModelFact>& theirs,
                             int their_rank);

/// UsageError when some rank's model cannot be trained by this group, or is not on `device` where one is given.
/// Collective, and throws on all ranks or on none.
void check_trainable(const WrappedModule& model, const std::optional<c10::Device>& device, const ProcessGroup& group);

/// MismatchError naming the first difference unless all ranks have the same model and the same options. Collective, and
/// throws on all ranks or on none.
void check_same_model(const WrappedModule& model, const DistributedDataParallelOptions& options,
                      const ProcessGroup& group);

}  // namespace lockstep
