#pragma once

#include <ATen/core/Tensor.h>

#include <lockstep/reduce_op.h>

namespace lockstep::nccl {

/// What NCCL does not reduce itself: the parts of all ranks, one in each row, in the order of ranks.
at::Tensor fold(const at::Tensor& rows, ReduceOp op);

}  // namespace lockstep::nccl
