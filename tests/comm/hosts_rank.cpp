// A rank of the tests in hosts_test.cpp and two_hosts_test.cpp: test_ranks hosts_rank GROUP..., each group as in 0,2.
// It prints which backend "auto" came to for the world and for the groups that it is in, once that has reduced right:
// "world: hierarchical", "0,2: gloo", and "done"; or what went wrong, and ends with 3.

#include <sstream>

#include <ATen/ATen.h>

#include <lockstep/lockstep.h>

#include "ranks/test_ranks.h"

namespace {

using lockstep::ProcessGroup;
using lockstep::ReduceOp;

std::vector<int> ranks_of(const std::string& group) {
  std::vector<int> ranks;
  std::istringstream list(group);
  for (std::string rank; std::getline(list, rank, ',');) ranks.push_back(std::stoi(rank));
  return ranks;
}

// Small whole numbers: exact in every dtype here, in any order.
at::Tensor values_of(int rank, int64_t elements, at::ScalarType dtype) {
  return at::arange(elements).add_(3 * rank).remainder_(8).to(dtype);
}

void check(const ProcessGroup& group, int64_t elements, at::ScalarType dtype, ReduceOp op, bool is_allocated) {
  auto tensor = is_allocated ? group.allocate({elements}, dtype) : at::empty({elements}, dtype);
  tensor.copy_(values_of(group.rank(), elements, dtype));
  group.all_reduce(tensor, op);
  auto expected = values_of(0, elements, at::kFloat);
  for (int rank = 1; rank < group.size(); ++rank) {
    auto next = values_of(rank, elements, at::kFloat);
    expected = op == ReduceOp::kMax ? at::maximum(expected, next) : expected + next;
  }
  if (op == ReduceOp::kAvg) expected = expected * (1.0f / static_cast<float>(group.size()));
  if (!at::equal(tensor, expected.to(dtype)))
    throw std::runtime_error("wrong: " + std::to_string(elements) + " of " + at::toString(dtype));
}

void check_and_name(const ProcessGroup& group, const std::string& name, const std::vector<int64_t>& sizes) {
  for (int64_t elements : sizes)
    for (bool is_allocated : {false, true})
      for (auto dtype : {at::kFloat, at::kBFloat16})
        for (auto op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax})
          check(group, elements, dtype, op, is_allocated);
  print_line(name + ": " + group.backend_name());
}

}  // namespace

int run_hosts_rank(const std::vector<std::string>& groups) {
  try {
    auto world = lockstep::init_process_group({.backend = "auto", .timeout = std::chrono::minutes(1)});
    check_and_name(world, "world", {1, 1001, (2 << 20) + 1});  // the last in several segments, and with a rest
    for (const auto& name : groups)
      if (auto group = world.new_group(ranks_of(name)); group.contains_me()) check_and_name(group, name, {1, 1001});
    world.barrier();
    print_line("done");
    return 0;
  } catch (const std::exception& error) {
    print_line(error.what());
    return 3;
  }
}
