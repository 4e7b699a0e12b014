#pragma once

#include <vector>

#include <ATen/ATen.h>

#include <lockstep/reduce_op.h>

/// What the collectives should give, by a plain loop over the ranks' tensors.

inline at::Tensor reduced(const std::vector<at::Tensor>& inputs, lockstep::ReduceOp op) {
  using lockstep::ReduceOp;
  auto dtype = inputs[0].scalar_type();
  bool is_half = dtype == at::kHalf || dtype == at::kBFloat16;
  auto result = inputs[0].to(is_half ? at::kFloat : dtype, /*non_blocking=*/false, /*copy=*/true);
  for (size_t r = 1; r < inputs.size(); ++r) {
    auto next = inputs[r].to(result.scalar_type());
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
        result = dtype == at::kBool ? result.logical_or(next) : result + next;
        break;
      case ReduceOp::kProduct:
        result = dtype == at::kBool ? result.logical_and(next) : result * next;
        break;
      case ReduceOp::kMin:
        result = at::minimum(result, next);
        break;
      case ReduceOp::kMax:
        result = at::maximum(result, next);
        break;
      case ReduceOp::kAnd:
        result = result.bitwise_and(next);
        break;
      case ReduceOp::kOr:
        result = result.bitwise_or(next);
        break;
      case ReduceOp::kXor:
        result = result.bitwise_xor(next);
        break;
    }
  }
  if (op == ReduceOp::kAvg) {
    if (dtype == at::kDouble)
      result = result * (1.0 / static_cast<double>(inputs.size()));
    else
      result = result * at::full({}, 1.0f / static_cast<float>(inputs.size()), at::kFloat);
  }
  return result.to(dtype);
}

inline std::vector<lockstep::ReduceOp> reduce_ops_for(at::ScalarType dtype) {
  using lockstep::ReduceOp;
  std::vector<ReduceOp> ops{ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax};
  if (at::isFloatingType(dtype)) {
    ops.push_back(ReduceOp::kAvg);
  } else {
    for (auto op : {ReduceOp::kAnd, ReduceOp::kOr, ReduceOp::kXor}) ops.push_back(op);
  }
  return ops;
}

/// Values of a rank that every rank can compute: `key` tells apart the tensors of one test.
inline at::Tensor values_of(int rank, at::ScalarType dtype, at::IntArrayRef sizes, uint64_t key = 0) {
  auto generator = at::detail::createCPUGenerator(1000 * key + static_cast<uint64_t>(rank));
  if (at::isFloatingType(dtype)) return at::randn(sizes, generator, at::kFloat).to(dtype);
  if (dtype == at::kBool) return at::randint(0, 2, sizes, generator, at::kLong).to(at::kBool);
  return at::randint(-100, 100, sizes, generator, at::kLong).to(dtype);
}

inline std::vector<at::Tensor> values_of_all(int size, at::ScalarType dtype, at::IntArrayRef sizes, uint64_t key = 0) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < size; ++rank) all.push_back(values_of(rank, dtype, sizes, key));
  return all;
}
