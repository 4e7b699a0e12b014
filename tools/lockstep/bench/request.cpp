#include "bench/request.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <lockstep/error.h>

#include "bench/sizes.h"

namespace lockstep::bench {
namespace {

constexpr int kFewestRounds = 5;
constexpr int kMostRanks = 1024;

/// Those whose ranks are processes: the others cannot be started here.
std::vector<std::string> measurable(std::vector<std::string> backends) {
  std::erase(backends, "threads");
  return backends;
}

std::vector<std::string> choose_backends(const std::vector<std::string>& wanted,
                                         const std::vector<std::string>& available) {
  const auto known = measurable(available);
  if (known.empty()) throw UsageError("this build has no backend whose ranks are processes: build it with Gloo");
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (std::find(known.begin(), known.end(), wanted[i]) == known.end())
      throw UsageError(
          fmt::format("--backends: there is no '{}' to measure; this build has {}", wanted[i], fmt::join(known, ", ")));
    if (std::find(wanted.begin(), wanted.begin() + static_cast<ptrdiff_t>(i), wanted[i]) !=
        wanted.begin() + static_cast<ptrdiff_t>(i))
      throw UsageError(fmt::format("--backends names '{}' twice: once is enough", wanted[i]));
  }
  return wanted.empty() ? known : wanted;
}

std::vector<int64_t> choose_sizes(const Request& request) {
  if (request.sizes.empty())
    return stepped_sizes(parse_bytes("--min", request.least), parse_bytes("--max", request.most), request.factor);
  std::vector<int64_t> sizes;
  for (const auto& written : request.sizes) sizes.push_back(parse_bytes("--sizes", written));
  return sizes;
}

Memory memory_named(const std::string& name) {
  for (Memory memory : {Memory::kAllocated, Memory::kOrdinary, Memory::kBoth})
    if (name == name_of(memory)) return memory;
  throw UsageError(fmt::format("--memory is \"{}\": it should be allocated, ordinary or both", name));
}

}  // namespace

Plan make_plan(const Request& request, const std::vector<std::string>& available) {
  Plan plan;
  plan.operation = operation_named(request.operation);
  plan.backends = choose_backends(request.backends, available);
  if (request.ranks < 1 || request.ranks > kMostRanks)
    throw UsageError(fmt::format("-n is {}: it should be a number of ranks from 1 to {}", request.ranks, kMostRanks));
  plan.ranks = request.ranks;
  plan.dtype = request.dtype;
  const int bytes = element_bytes(plan.dtype);
  if (reduces(plan.operation)) check_reduction(request.redop, plan.dtype);
  plan.redop = reduces(plan.operation) ? request.redop : "none";
  plan.sizes = {0};
  if (plan.operation != Operation::kBarrier)
    plan.sizes = whole_sizes(plan.operation, choose_sizes(request), bytes, plan.ranks);
  plan.memory = memory_named(request.memory);
  if (request.rounds != 0 && request.rounds < kFewestRounds)
    throw UsageError(
        fmt::format("--rounds is {}: it should be {} or more, or left out", request.rounds, kFewestRounds));
  plan.rounds = request.rounds;
  plan.check = request.check;
  return plan;
}

int64_t memory_bytes(const Plan& plan) {
  const int64_t kinds = plan.memory == Memory::kBoth ? 2 : 1;
  // Two of each side: what is given and what is gotten, or what a backend keeps for itself. One for the floor.
  const int64_t buffers = 2 * kinds * static_cast<int64_t>(plan.backends.size()) + 1;
  return buffers * plan.ranks * *std::max_element(plan.sizes.begin(), plan.sizes.end());
}

}  // namespace lockstep::bench
