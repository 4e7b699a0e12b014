#pragma once

#include <ATen/core/Tensor.h>

#include <lockstep/reduce_op.h>

namespace lockstep::nccl {

/// Reduces the rows of a tensor, one row per rank, in the order of ranks. For operations that NCCL lacks.
at::Tensor fold(const at::Tensor& rows, ReduceOp op);

}  // namespace lockstep::nccl
