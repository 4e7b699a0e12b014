#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/environment.h>

namespace lockstep {

/// What this host lets its workers use. Control groups of version 1 and 2, and containers in which the group's files
/// stand at the top. Everything is read under `root`, which tests set to a folder of their own.
class Machine {
 public:
  explicit Machine(std::string root = "");

  /// The cores that this process may run on.
  std::vector<int> cores() const;
  /// How many of them its control group lets it keep busy: 1 or more.
  int usable_cores() const;
  /// The GPUs that workers will see: the entries of CUDA_VISIBLE_DEVICES, else NVIDIA's devices.
  int gpus(const Environment::Lookup& lookup) const;
  /// How many processes of this control group were killed for want of memory; none when the system does not tell.
  std::optional<int64_t> out_of_memory_kills() const;

 private:
  std::vector<std::string> groups_of(const std::string& controller) const;

  const std::string root_;
};

/// Cores for each of `workers`, disjoint and as even as can be; empty lists when there are fewer cores than workers.
std::vector<std::vector<int>> deal_cores(const std::vector<int>& cores, int workers);

}  // namespace lockstep
