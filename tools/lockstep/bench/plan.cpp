#include "bench/plan.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <lockstep/error.h>

namespace lockstep::bench {
namespace {

using nlohmann::json;

struct Dtype {
  const char* name;
  int bytes;
  bool is_floating;
};

constexpr Dtype kDtypes[] = {{"float32", 4, true}, {"float64", 8, true}, {"float16", 2, true}, {"bfloat16", 2, true},
                             {"uint8", 1, false},  {"int8", 1, false},   {"int16", 2, false},  {"int32", 4, false},
                             {"int64", 8, false},  {"bool", 1, false}};

constexpr const char* kRedops[] = {"sum", "avg", "product", "min", "max", "and", "or", "xor"};

const Dtype& dtype_named(const std::string& name) {
  for (const auto& dtype : kDtypes)
    if (name == dtype.name) return dtype;
  throw UsageError(fmt::format("--dtype is \"{}\": it should be one of {}", name, fmt::join(dtype_names(), ", ")));
}

}  // namespace

NLOHMANN_JSON_SERIALIZE_ENUM(Memory, {{Memory::kAllocated, "allocated"},
                                      {Memory::kOrdinary, "ordinary"},
                                      {Memory::kBoth, "both"}})
NLOHMANN_JSON_SERIALIZE_ENUM(Operation, {{Operation::kAllReduce, "all-reduce"},
                                         {Operation::kReduceScatter, "reduce-scatter"},
                                         {Operation::kAllGather, "all-gather"},
                                         {Operation::kBroadcast, "broadcast"},
                                         {Operation::kBarrier, "barrier"}})
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Plan, operation, backends, ranks, sizes, dtype, redop, memory, rounds, check, bind,
                                   is_crowded, page, results)

const char* name_of(Memory memory) {
  if (memory == Memory::kBoth) return "both";
  return memory == Memory::kAllocated ? "allocated" : "ordinary";
}

std::string to_text(const Plan& plan) {
  return json(plan).dump();
}

Plan plan_from(const std::string& text) {
  return json::parse(text).get<Plan>();
}

int64_t page_bytes(int ranks) {
  return 128 * (8 + int64_t{ranks});
}

int element_bytes(const std::string& dtype) {
  return dtype_named(dtype).bytes;
}

void check_reduction(const std::string& redop, const std::string& dtype) {
  const auto names = redop_names();
  if (std::find(names.begin(), names.end(), redop) == names.end())
    throw UsageError(fmt::format("--op is \"{}\": it should be one of {}", redop, fmt::join(names, ", ")));
  const bool is_floating = dtype_named(dtype).is_floating;
  if (redop == "avg" && !is_floating)
    throw UsageError(fmt::format("--op avg has no result for {}: give a floating --dtype, or --op sum", dtype));
  if (is_floating && (redop == "and" || redop == "or" || redop == "xor"))
    throw UsageError(fmt::format("--op {} has no result for {}: give an integer --dtype or bool", redop, dtype));
}

std::vector<std::string> dtype_names() {
  std::vector<std::string> names;
  for (const auto& dtype : kDtypes) names.emplace_back(dtype.name);
  return names;
}

std::vector<std::string> redop_names() {
  return {std::begin(kRedops), std::end(kRedops)};
}

}  // namespace lockstep::bench
