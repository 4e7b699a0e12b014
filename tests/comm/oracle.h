#pragma once

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include <lockstep/reduce_op.h>

/// What the collectives should give, by a plain loop over the ranks' tensors.

inline at::Tensor reduced_in_order(const std::vector<at::Tensor>& inputs, lockstep::ReduceOp op) {
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

/// The same as a hierarchy of hosts does it: inside each host, and then over the hosts.
inline at::Tensor reduced_by_hosts(const std::vector<at::Tensor>& inputs, lockstep::ReduceOp op,
                                   const std::vector<std::string>& host_of_rank) {
  using lockstep::ReduceOp;
  auto dtype = inputs[0].scalar_type();
  if (dtype == at::kHalf || dtype == at::kBFloat16) {
    std::vector<at::Tensor> wide;
    for (const auto& input : inputs) wide.push_back(input.to(at::kFloat));
    return reduced_by_hosts(wide, op, host_of_rank).to(dtype);
  }
  auto sum = op == ReduceOp::kAvg ? ReduceOp::kSum : op;
  std::vector<std::string> hosts;
  for (const auto& host : host_of_rank)
    if (std::find(hosts.begin(), hosts.end(), host) == hosts.end()) hosts.push_back(host);
  std::vector<at::Tensor> of_hosts;
  for (const auto& host : hosts) {
    std::vector<at::Tensor> inside;
    for (size_t rank = 0; rank < inputs.size(); ++rank)
      if (host_of_rank[rank] == host) inside.push_back(inputs[rank]);
    of_hosts.push_back(reduced_in_order(inside, sum));
  }
  auto result = reduced_in_order(of_hosts, sum);
  if (op != ReduceOp::kAvg) return result;
  if (dtype == at::kDouble) return result * (1.0 / static_cast<double>(inputs.size()));
  return result * at::full({}, 1.0f / static_cast<float>(inputs.size()), at::kFloat);
}

/// The hosts that the ranks of this test believe to be on: LOCKSTEP_TEST_HOSTS, as in "a,a,b". Empty: on one.
inline std::vector<std::string> hosts_of_ranks() {
  std::vector<std::string> hosts;
  const char* value = std::getenv("LOCKSTEP_TEST_HOSTS");
  std::istringstream list(value ? value : "");
  for (std::string host; std::getline(list, host, ',');) hosts.push_back(host);
  return hosts;
}

inline at::Tensor reduced(const std::vector<at::Tensor>& inputs, lockstep::ReduceOp op) {
  auto hosts = hosts_of_ranks();
  return hosts.empty() ? reduced_in_order(inputs, op) : reduced_by_hosts(inputs, op, hosts);
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
