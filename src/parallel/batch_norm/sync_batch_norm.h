#pragma once

#include <optional>
#include <string>

#include <torch/nn/module.h>

namespace lockstep {

/// Returns the name of a layer in `module` that normalizes over the ranks: a SyncBatchNorm or a converted layer.
/// Returns nothing if there is none.
std::optional<std::string> synced_batch_norm_in(torch::nn::Module& module);

}  // namespace lockstep
