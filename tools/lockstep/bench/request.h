#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bench/plan.h"

namespace lockstep::bench {

/// What the user wrote. Empty or 0: not said.
struct Request {
  std::string operation{};
  std::vector<std::string> backends{};
  std::optional<int> ranks{};
  std::string least{};
  std::string most{};
  int64_t factor = 0;
  std::vector<std::string> sizes{};
  std::string dtype{};
  std::string redop{};
  std::string memory{};
  std::vector<std::string> models{};
  std::string backend{};
  std::string against{};
  int rounds = 0;
  bool check = true;
};

/// What holds where nothing is said.
inline constexpr int kDefaultRanks = 2;
inline constexpr const char* kDefaultLeast = "4";
inline constexpr const char* kDefaultMost = "256M";
inline constexpr int64_t kDefaultFactor = 2;

/// Pure. `available` are the backends that this build has. UsageError naming the option, what came and what it should
/// be, also for an option that says nothing about the operation.
Plan make_plan(const Request& request, const std::vector<std::string>& available);

/// Whether the name is among them.
bool has(const std::vector<std::string>& names, const std::string& name);

/// The ranks, the rounds and whether results are checked. UsageError for a number out of range.
RunPlan make_run_plan(const Request& request);

/// How much memory all ranks together need for the largest size, at most.
int64_t memory_bytes(const Plan& plan);

}  // namespace lockstep::bench
