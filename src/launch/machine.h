#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include <lockstep/environment.h>

namespace lockstep {

/// The resources that workers on this host may use. `root` is prepended to every path, for tests.
class Machine {
 public:
  explicit Machine(std::filesystem::path root = "/");

  /// The cores that this process may run on.
  std::vector<int> cores() const;
  /// The number of cores, limited by the quota of the cgroup; at least 1.
  int usable_cores() const;
  /// The number of GPUs that workers see: the entries of CUDA_VISIBLE_DEVICES, else NVIDIA's device files.
  int gpus(const Environment::Lookup& lookup) const;
  /// See read_cgroup_oom_kills().
  std::optional<int64_t> out_of_memory_kills() const;

 private:
  const std::filesystem::path root_;
};

/// Divides the cores into disjoint sets of nearly equal size, one for each worker. The sets are empty when there are
/// fewer cores than workers.
std::vector<std::vector<int>> assign_cores(const std::vector<int>& cores, int workers);

}  // namespace lockstep
