#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <torch/nn/module.h>

#include <lockstep/process_group.h>

namespace lockstep {

/// Returns the name of a layer in `module` that normalizes over the ranks: a SyncBatchNorm or a converted layer.
/// Returns nothing if there is none.
std::optional<std::string> synced_batch_norm_in(torch::nn::Module& module);

/// Returns the number of such layers in `module` that use this group itself, not another group of the same ranks.
int64_t synced_batch_norms_over(torch::nn::Module& module, const ProcessGroup& group);

}  // namespace lockstep
