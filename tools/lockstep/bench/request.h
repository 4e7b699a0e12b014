#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bench/checkpoint_plan.h"
#include "bench/rank_protocol.h"

namespace lockstep::bench {

/// The options from the command line. Empty or 0: not given.
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
  std::string optimizer{};
  std::string against{};
  std::string python{};
  std::string bytes{};
  std::string folder{};
  int rounds = 0;
  bool check = true;
  std::vector<std::string> compile_modes{};
};

/// Defaults.
inline constexpr int kDefaultRanks = 2;
inline constexpr const char* kDefaultMin = "4";
inline constexpr const char* kDefaultMax = "64M";
inline constexpr int64_t kDefaultFactor = 4;
inline constexpr const char* kDefaultStateBytes = "1G";

/// Makes the plan of a collective. `available` are the backends of this build. Throws UsageError for invalid options
/// and for options that do not apply to the operation. Pure.
CollectivePlan make_collective_plan(const Request& request, const std::vector<std::string>& available);

/// Whether `names` contains `name`.
bool contains(const std::vector<std::string>& names, const std::string& name);

/// Makes the common part of a plan. Throws UsageError for a number out of range.
RunPlan make_run_plan(const Request& request);

/// An upper bound of the memory that all ranks together need for the largest size.
int64_t memory_bytes(const CollectivePlan& plan);

/// Throws UsageError if the request has options that do not apply to training.
void reject_collective_options(const Request& request);

/// Returns the wanted models in their order, or all known models if none is given. Throws UsageError for an unknown or
/// repeated name.
std::vector<std::string> choose_models(const std::vector<std::string>& wanted, const std::vector<std::string>& known);

/// Makes the plan of `ddp`, without the Python interpreter. `available` are the backends of this build. Throws
/// UsageError for invalid options and for options that do not apply to training. Pure.
DdpPlan make_ddp_plan(const Request& request, const std::vector<std::string>& available);

/// Models to train with one rank on one GPU.
struct GpuPlan {
  std::vector<std::string> models{};
  int rounds = 0;  // 0: as many as fit into about a minute in total, at least 5
  bool check = true;
  std::vector<std::string> compile_modes{};  // of torch.compile; empty: compiled models are not measured
};

/// Makes the plan of `gpu`. `gpus` are the GPUs that this build can use. Throws UsageError for invalid options and for
/// options that do not apply to training on a GPU. Pure.
GpuPlan make_gpu_plan(const Request& request, const std::vector<std::string>& gpus);

/// Makes the plan of `checkpoint`, without the number of threads. Throws UsageError for invalid options and for options
/// that do not apply. Pure.
CheckpointPlan make_checkpoint_plan(const Request& request);

/// The modes of torch.compile that can be compared: default, reduce-overhead and max-autotune.
std::vector<std::string> compile_mode_names();

/// mlp-small, cnn, gpt-6x384 and gpt-124m; docs/bench.md describes them.
std::vector<std::string> gpu_model_names();

}  // namespace lockstep::bench
