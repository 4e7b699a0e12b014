#include "bench/sizes.h"

#include <algorithm>
#include <charconv>
#include <limits>

#include <fmt/format.h>

#include <lockstep/error.h>

namespace lockstep::bench {
namespace {

constexpr int64_t kMost = int64_t{1} << 40;
constexpr const char* kUnits = "KMG";

bool is_split(Operation operation) {
  return operation == Operation::kReduceScatter || operation == Operation::kAllGather;
}

}  // namespace

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
        fmt::format("{} is \"{}\": it should be a number of bytes from 1 to 1024G, as in 4, 64K, 25M or 1G (K is 1024)",
                    option, written));
  return number * unit;
}

std::string written_bytes(int64_t bytes) {
  for (int power = 3; power > 0; --power) {
    const int64_t unit = int64_t{1} << (10 * power);
    if (bytes >= unit && bytes % unit == 0) return fmt::format("{}{}", bytes / unit, kUnits[power - 1]);
  }
  return fmt::format("{}", bytes);
}

std::vector<int64_t> stepped_sizes(int64_t least, int64_t most, int64_t factor) {
  if (least > most)
    throw UsageError(fmt::format("--min is {} and --max is {}: the sizes go from the smaller to the larger",
                                 written_bytes(least), written_bytes(most)));
  if (factor < 2) throw UsageError(fmt::format("--factor is {}: it should be 2 or more", factor));
  std::vector<int64_t> sizes{least};
  while (sizes.back() <= most / factor) sizes.push_back(sizes.back() * factor);
  return sizes;
}

int64_t count_of(Operation operation, int64_t bytes, int element_bytes, int ranks) {
  return std::max<int64_t>(1, bytes / element_bytes / (is_split(operation) ? ranks : 1));
}

int64_t bytes_of(Operation operation, int64_t count, int element_bytes, int ranks) {
  return count * element_bytes * (is_split(operation) ? ranks : 1);
}

std::vector<int64_t> whole_sizes(Operation operation, const std::vector<int64_t>& sizes, int element_bytes, int ranks) {
  std::vector<int64_t> whole;
  for (int64_t bytes : sizes) {
    const int64_t rounded = bytes_of(operation, count_of(operation, bytes, element_bytes, ranks), element_bytes, ranks);
    if (std::find(whole.begin(), whole.end(), rounded) == whole.end()) whole.push_back(rounded);
  }
  return whole;
}

int calls_per_sample(int64_t bytes) {
  constexpr int64_t kSingle = 64 << 10, kMostCalls = 64;
  return static_cast<int>(std::clamp<int64_t>(kSingle / std::max<int64_t>(bytes, 1), 1, kMostCalls));
}

}  // namespace lockstep::bench
