#include "backends/nccl/fold.h"

#include <ATen/ATen.h>

namespace lockstep::nccl {
namespace {

at::Tensor combine(const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  const bool is_bool = a.scalar_type() == at::kBool;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:  // not reached: NCCL averages floating-point tensors itself
      return is_bool ? a.logical_or(b) : a + b;
    case ReduceOp::kProduct:
      return is_bool ? a.logical_and(b) : a * b;
    case ReduceOp::kMin:
      return at::minimum(a, b);
    case ReduceOp::kMax:
      return at::maximum(a, b);
    case ReduceOp::kAnd:
      return a.bitwise_and(b);
    case ReduceOp::kOr:
      return a.bitwise_or(b);
    case ReduceOp::kXor:
      return a.bitwise_xor(b);
  }
  return a;
}

}  // namespace

at::Tensor fold(const at::Tensor& rows, ReduceOp op) {
  auto result = rows[0];
  for (int64_t rank = 1; rank < rows.size(0); ++rank) result = combine(result, rows[rank], op);
  return result;
}

}  // namespace lockstep::nccl
