#pragma once

#include <optional>
#include <string>

#include <torch/nn/module.h>

namespace lockstep {

/// The name of a layer in the module that normalises by the batches of several ranks, if one does.
std::optional<std::string> synced_batch_norm_in(torch::nn::Module& module);

}  // namespace lockstep
