#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bench/rank_protocol.h"

namespace lockstep::bench {

/// What the user wrote. Empty or 0: not said.
struct Request {
  std::string operation{};
  std::vector<std::string> backends{};
  std::optional<int> ranks{};
  std::string min_size{};
  std::string max_size{};
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
inline constexpr const char* kDefaultMin = "4";
inline constexpr const char* kDefaultMax = "256M";
inline constexpr int64_t kDefaultFactor = 2;

/// Pure. `available` are the backends that this build has. UsageError naming the option, what came and what it should
/// be, also for an option that says nothing about the operation.
CollectivePlan make_collective_plan(const Request& request, const std::vector<std::string>& available);

/// Whether the name is among them.
bool contains(const std::vector<std::string>& names, const std::string& name);

/// The ranks, the rounds and whether results are checked. UsageError for a number out of range.
RunPlan make_run_plan(const Request& request);

/// How much memory all ranks together need for the largest size, at most.
int64_t memory_bytes(const CollectivePlan& plan);

/// What ddp and gpu, which train models, have in common. Both throw UsageError naming the option.

/// Refuses options that say nothing about training.
void reject_collective_options(const Request& request);

/// Those that are wanted, in that order; all that are known when none is.
std::vector<std::string> choose_models(const std::vector<std::string>& wanted, const std::vector<std::string>& known);

/// Pure. `available` are the backends that this build has. UsageError naming the option, what came and what it should
/// be, also for an option that says nothing about training. Which Python is compared with stays open.
DdpPlan make_ddp_plan(const Request& request, const std::vector<std::string>& available);

/// Models that one rank trains on one GPU.
struct GpuPlan {
  std::vector<std::string> models{};
  int rounds = 0;  // 0: as many as fit into about a minute in all, 5 at least
  bool check = true;
};

/// Pure. `gpus` are those that this build can use. UsageError naming the option, what came and what it should be, also
/// for an option that says nothing about training on a GPU.
GpuPlan make_gpu_plan(const Request& request, const std::vector<std::string>& gpus);

/// mlp-small, cnn, gpt-6x384 and gpt-124m: docs/bench.md has their layers.
std::vector<std::string> gpu_model_names();

}  // namespace lockstep::bench
