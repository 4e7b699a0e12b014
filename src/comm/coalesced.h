#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/process_group.h>

namespace lockstep {

/// Broadcasts many tensors in few messages: tensors of one dtype travel together. Collective.
void broadcast_coalesced(const ProcessGroup& group, const std::vector<at::Tensor>& tensors, int root);

}  // namespace lockstep
