#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <lockstep/process_group.h>

namespace lockstep {

/// Returns the weights of the module's Embedding and EmbeddingBag layers whose option sparse is set: their gradients
/// are sparse.
std::vector<const c10::TensorImpl*> sparse_weights_of(const torch::nn::Module& module);

/// Averages the gradients of several parameters over the ranks. `gradients` may be undefined (zero), sparse, or dense;
/// they may have different rows on each rank. Returns sparse, coalesced gradients, with the same bits on every rank.
/// Sends the rows that a rank has, not the whole gradient. Collective. On a GPU the host waits for the number of rows.
std::vector<at::Tensor> average_sparse(const ProcessGroup& group, const std::vector<at::Tensor>& gradients,
                                       const std::vector<at::Tensor>& parameters);

}  // namespace lockstep
