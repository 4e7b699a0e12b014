#pragma once

#include <string>
#include <vector>

#include "bench/request.h"

namespace lockstep::bench {

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
