#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace lockstep {

/// Limits set by a container or a batch system. None: no limit.
struct CgroupLimits {
  std::optional<double> cores;
  std::optional<uint64_t> memory_bytes;
  uint64_t memory_used_bytes = 0;  // counted against the limit, without reclaimable page cache
  std::optional<uint64_t> processes;

  bool operator==(const CgroupLimits&) const = default;
};

/// The smallest limits from this process's cgroup up to the visible root, for cgroup v2 and v1. `root` is prepended to
/// every path, for tests. Limits that cannot be read count as none.
CgroupLimits read_cgroup_limits(const std::filesystem::path& root = "/");

/// The number of processes of this process's cgroup that were killed because memory ran out; none when the kernel does
/// not count them.
std::optional<int64_t> read_cgroup_oom_kills(const std::filesystem::path& root = "/");

}  // namespace lockstep
