#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace lockstep::tool {

/// What a container or a batch system lets this process use. None: no limit.
struct CgroupLimits {
  std::optional<double> cores;
  std::optional<uint64_t> memory_bytes;
  uint64_t memory_used_bytes = 0;  // of that limit, without files that the kernel may drop
  std::optional<uint64_t> processes;

  bool operator==(const CgroupLimits&) const = default;
};

/// The smallest limits from this process's groups up to the root that can be seen, of cgroup v2 and v1.
/// `root` stands before every path that is read, for tests. What cannot be read is no limit.
CgroupLimits read_cgroup_limits(const std::filesystem::path& root = "/");

}  // namespace lockstep::tool
