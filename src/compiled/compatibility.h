#pragma once

#include <optional>
#include <string>
#include <vector>

#include "compiled/description.h"

namespace lockstep::detail {

/// What a compiled model needs of the process and the machine.
struct Machine {
  std::string torch;                      // "2.11.0"
  std::string architecture;               // "x86_64"
  std::vector<std::string> instructions;  // names of /proc/cpuinfo
  int gpus = 0;                           // that this process can use
  std::string compute_capability{};       // of the model's GPU: "9.0"
};

/// Returns this machine, with the compute capability of the GPU if the device is one.
Machine this_machine(std::optional<c10::Device> gpu);

/// Returns why the machine cannot run the model, and what to do; empty if it can. Pure.
std::string find_incompatibility(const CompiledDescription& model, const Machine& machine);

}  // namespace lockstep::detail
