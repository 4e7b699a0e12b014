#pragma once

#include <string>
#include <vector>

#include "bench/run_plan.h"

namespace lockstep::bench {

/// Samples that a rank trains on in a step.
inline constexpr int kBatch = 32;

/// Models to train: decided by lockstep, carried out by lockstep-bench, which gets it as JSON. Rank 0's results are the
/// DdpMessages of messages.h.
struct DdpPlan : RunPlan {
  std::vector<std::string> models{};
  std::string backend = "auto";
  std::string python{};        // an interpreter that has torch; empty: PyTorch's own is not measured
  std::string python_store{};  // a file, empty at first, by which Python's ranks meet

  bool operator==(const DdpPlan&) const = default;
};

std::string to_text(const DdpPlan& plan);
DdpPlan ddp_plan_from(const std::string& text);

/// small, cnn and mlp: docs/bench.md has their layers.
std::vector<std::string> model_names();

}  // namespace lockstep::bench
