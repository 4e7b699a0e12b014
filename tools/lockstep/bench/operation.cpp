#include "bench/operation.h"

#include <algorithm>
#include <charconv>
#include <limits>
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

constexpr int64_t kMost = int64_t{1} << 40;
constexpr const char* kUnits = "KMG";

bool is_split(Operation operation) {
  return operation == Operation::kReduceScatter || operation == Operation::kAllGather;
}

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
  throw UsageError(fmt::format("--dtype is \"{}\": it must be one of {}", name, fmt::join(dtype_names(), ", ")));
}

}  // namespace

const char* name_of(Operation operation) {
  for (const auto& [known, name] : kNames)
    if (known == operation) return name;
  return "";
}

Operation operation_named(const std::string& name) {
  std::string with_dashes = name;  // "all_reduce", the name in ProcessGroup, is accepted too
  std::replace(with_dashes.begin(), with_dashes.end(), '_', '-');
  for (const auto& [known, known_name] : kNames)
    if (with_dashes == known_name) return known;
  throw UsageError(
      fmt::format("unknown operation '{}': it must be one of {}", name, fmt::join(operation_names(), ", ")));
}

std::vector<std::string> operation_names() {
  std::vector<std::string> names;
  for (const auto& [operation, name] : kNames) names.emplace_back(name);
  names.emplace_back(kDdp);
  names.emplace_back(kGpu);
  names.emplace_back(kCheckpoint);
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
    case Operation::kAllReduce:  // in place: every byte is read once and written once
      return 2 * ranks * size;
    case Operation::kReduceScatter:  // reads all inputs, writes one result
    case Operation::kAllGather:      // reads the parts of one result, writes it on every rank
      return (ranks + 1) * size;
    case Operation::kBroadcast:  // reads the root's buffer, writes the buffers of the other ranks
      return ranks * size;
    default:
      return 0;
  }
}

int64_t parse_bytes(const std::string& option, const std::string& written) {
  const char* end = written.data() + written.size();
  int64_t number = 0;
  auto [rest, error] = std::from_chars(written.data(), end, number);
  int64_t unit = 1;
  if (error == std::errc() && rest + 1 == end) {
    const auto power = std::string_view(kUnits).find(*rest);
    if (power != std::string_view::npos) {
      unit = int64_t{1} << (10 * (power + 1));
      ++rest;
    }
  }
  if (error != std::errc() || rest != end || number < 1 || number > kMost / unit)
    throw UsageError(
        fmt::format("{} is \"{}\": it must be a number of bytes from 1 to 1024G, as in 4, 64K, 25M or 1G (K is 1024)",
                    option, written));
  return number * unit;
}

std::string format_size(int64_t bytes) {
  for (int power = 3; power > 0; --power) {
    const int64_t unit = int64_t{1} << (10 * power);
    if (bytes >= unit && bytes % unit == 0) return fmt::format("{}{}", bytes / unit, kUnits[power - 1]);
  }
  return fmt::format("{}", bytes);
}

std::vector<int64_t> size_range(int64_t least, int64_t most, int64_t factor) {
  if (least > most)
    throw UsageError(fmt::format("--min is {} and --max is {}: --min must not be larger than --max", format_size(least),
                                 format_size(most)));
  if (factor < 2) throw UsageError(fmt::format("--factor is {}: it must be 2 or more", factor));
  std::vector<int64_t> sizes{least};
  while (sizes.back() <= most / factor) sizes.push_back(sizes.back() * factor);
  return sizes;
}

int64_t element_count(Operation operation, int64_t bytes, int element_bytes, int ranks) {
  return std::max<int64_t>(1, bytes / element_bytes / (is_split(operation) ? ranks : 1));
}

int64_t buffer_bytes(Operation operation, int64_t count, int element_bytes, int ranks) {
  return count * element_bytes * (is_split(operation) ? ranks : 1);
}

std::vector<int64_t> round_to_elements(Operation operation, const std::vector<int64_t>& sizes, int element_bytes,
                                       int ranks) {
  std::vector<int64_t> result;
  for (int64_t bytes : sizes) {
    const int64_t rounded =
        buffer_bytes(operation, element_count(operation, bytes, element_bytes, ranks), element_bytes, ranks);
    if (std::find(result.begin(), result.end(), rounded) == result.end()) result.push_back(rounded);
  }
  return result;
}

int calls_per_sample(int64_t bytes) {
  constexpr int64_t kSingle = 64 << 10, kMaxCalls = 64;
  return static_cast<int>(std::clamp<int64_t>(kSingle / std::max<int64_t>(bytes, 1), 1, kMaxCalls));
}

int element_bytes(const std::string& dtype) {
  return dtype_named(dtype).bytes;
}

void check_reduction(const std::string& redop, const std::string& dtype) {
  const auto names = redop_names();
  if (std::find(names.begin(), names.end(), redop) == names.end())
    throw UsageError(fmt::format("--op is \"{}\": it must be one of {}", redop, fmt::join(names, ", ")));
  const bool is_floating = dtype_named(dtype).is_floating;
  if (redop == "avg" && !is_floating)
    throw UsageError(fmt::format("--op avg is not defined for {}: use a floating-point --dtype, or --op sum", dtype));
  if (is_floating && (redop == "and" || redop == "or" || redop == "xor"))
    throw UsageError(fmt::format("--op {} is not defined for {}: use an integer --dtype or bool", redop, dtype));
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
