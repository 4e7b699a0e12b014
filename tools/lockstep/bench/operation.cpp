#include "bench/operation.h"

#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <lockstep/error.h>

namespace lockstep::bench {
namespace {

constexpr std::pair<Operation, const char*> kNames[] = {{Operation::kAllReduce, "all-reduce"},
                                                        {Operation::kReduceScatter, "reduce-scatter"},
                                                        {Operation::kAllGather, "all-gather"},
                                                        {Operation::kBroadcast, "broadcast"},
                                                        {Operation::kBarrier, "barrier"}};

}  // namespace

const char* name_of(Operation operation) {
  for (const auto& [known, name] : kNames)
    if (known == operation) return name;
  return "";
}

Operation operation_named(const std::string& name) {
  for (const auto& [known, known_name] : kNames)
    if (name == known_name) return known;
  throw UsageError(fmt::format("there is no operation '{}' to measure: it should be one of {}", name,
                               fmt::join(operation_names(), ", ")));
}

std::vector<std::string> operation_names() {
  std::vector<std::string> names;
  for (const auto& [operation, name] : kNames) names.emplace_back(name);
  names.emplace_back(kDdp);
  names.emplace_back(kGpu);
  return names;
}

bool reduces(Operation operation) {
  return operation == Operation::kAllReduce || operation == Operation::kReduceScatter;
}

double bus_factor(Operation operation, int ranks) {
  const double others = static_cast<double>(ranks - 1) / ranks;
  switch (operation) {
    case Operation::kAllReduce:
      return 2 * others;
    case Operation::kReduceScatter:
    case Operation::kAllGather:
      return others;
    default:
      return 1;
  }
}

double floor_traffic(Operation operation, int ranks, int64_t bytes) {
  const auto size = static_cast<double>(bytes);
  switch (operation) {
    case Operation::kAllReduce:  // in place: everything is read once and written once
      return 2 * ranks * size;
    case Operation::kReduceScatter:  // reads all inputs, writes one result
    case Operation::kAllGather:      // reads one result's parts, writes it everywhere
      return (ranks + 1) * size;
    case Operation::kBroadcast:  // reads the root's, writes the others'
      return ranks * size;
    default:
      return 0;
  }
}

}  // namespace lockstep::bench
