#include "base/cgroup.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "base/text.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

/// The folders of one controller, from this process's cgroup up to the mount point of the hierarchy.
using Groups = std::vector<fs::path>;

struct Mount {
  fs::path root_group;  // the cgroup that is mounted at `point`
  fs::path point;
  bool is_v2 = false;
  std::string options;
};

std::vector<Mount> read_mounts(const fs::path& root) {
  std::vector<Mount> mounts;
  std::ifstream file(root / "proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string skipped, root_group, point, type;
    words >> skipped >> skipped >> skipped >> root_group >> point;
    while (words >> skipped && skipped != "-") continue;  // a dash ends the optional fields
    Mount mount;
    words >> type >> skipped >> mount.options;
    mount.root_group = root_group;
    mount.point = root / fs::path(point).relative_path();
    mount.is_v2 = type == "cgroup2";
    if (mount.is_v2 || type == "cgroup") mounts.push_back(mount);
  }
  if (mounts.empty()) {  // the usual places
    mounts.push_back({"/", root / "sys/fs/cgroup", true, ""});
    for (const char* controller : {"cpu", "memory", "pids"})
      mounts.push_back({"/", root / "sys/fs/cgroup" / controller, false, controller});
  }
  return mounts;
}

bool contains_controller(const std::string& options, const std::string& controller) {
  return ("," + options + ",").find("," + controller + ",") != std::string::npos;
}

Groups ancestors_of(const Mount& mount, const fs::path& group) {
  const fs::path below = group.lexically_relative(mount.root_group);
  Groups groups;
  // In a container that sees only its own cgroup, the path lies outside the mounted part; the mount point is that
  // cgroup.
  if (!below.empty() && below != "." && *below.begin() != "..")
    for (fs::path folder = mount.point / below; folder != mount.point; folder = folder.parent_path())
      groups.push_back(folder);
  groups.push_back(mount.point);
  return groups;
}

/// An empty `controller` means the unified hierarchy of v2.
Groups groups_of(const fs::path& root, const std::vector<Mount>& mounts, const std::string& controller) {
  std::ifstream file(root / "proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // "4:cpu,cpuacct:/path", of v2 "0::/path"
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (controller.empty() ? !controllers.empty() : !contains_controller(controllers, controller)) continue;
    for (const auto& mount : mounts)
      if (controller.empty() ? mount.is_v2 : !mount.is_v2 && contains_controller(mount.options, controller))
        return ancestors_of(mount, line.substr(second + 1));
  }
  return {};
}

/// The number in a file; none for other text, such as "max" or "-1", and for a missing file.
std::optional<uint64_t> read_integer(const fs::path& path) {
  std::ifstream file(path);
  std::string word;
  file >> word;
  return parse_number<uint64_t>(word);
}

template <class Number>
void lower(std::optional<Number>& limit, Number candidate) {
  limit = limit ? std::min(*limit, candidate) : candidate;
}

void read_cores(const Groups& v2, const Groups& v1, CgroupLimits& limits) {
  for (const auto& group : v2) {  // "200000 100000" or "max 100000"
    std::ifstream file(group / "cpu.max");
    double quota = 0, period = 0;
    if (file >> quota >> period && period > 0) lower(limits.cores, quota / period);
  }
  for (const auto& group : v1) {
    const auto quota = read_integer(group / "cpu.cfs_quota_us");  // -1 (no quota) does not parse as unsigned
    const auto period = read_integer(group / "cpu.cfs_period_us");
    if (quota && period && *period > 0) lower(limits.cores, static_cast<double>(*quota) / static_cast<double>(*period));
  }
}

/// The number after `name` in a file of lines "name number"; none when the file has no such line.
std::optional<uint64_t> read_count(const fs::path& path, const std::string& name) {
  std::ifstream file(path);
  uint64_t count = 0;
  for (std::string word; file >> word >> count;)
    if (word == name) return count;
  return std::nullopt;
}

void read_memory(const Groups& groups, const std::string& limit_name, const std::string& used_name,
                 const std::string& reclaimable_name, CgroupLimits& limits) {
  constexpr uint64_t kUnlimited = uint64_t{1} << 60;  // v1 writes "none" as a number near 2^63
  for (const auto& group : groups) {
    const auto limit = read_integer(group / limit_name);
    if (!limit || *limit >= limits.memory_bytes.value_or(kUnlimited)) continue;
    const uint64_t used = read_integer(group / used_name).value_or(0);
    limits.memory_bytes = limit;
    limits.memory_used_bytes = used - std::min(used, read_count(group / "memory.stat", reclaimable_name).value_or(0));
  }
}

}  // namespace

CgroupLimits read_cgroup_limits(const fs::path& root) {
  const auto mounts = read_mounts(root);
  const auto of = [&](const std::string& controller) { return groups_of(root, mounts, controller); };
  const Groups v2 = of("");
  CgroupLimits limits;
  read_cores(v2, of("cpu"), limits);
  read_memory(v2, "memory.max", "memory.current", "inactive_file", limits);
  read_memory(of("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", limits);
  for (const auto& groups : {v2, of("pids")})
    for (const auto& group : groups)
      if (const auto processes = read_integer(group / "pids.max")) lower(limits.processes, *processes);
  return limits;
}

std::optional<int64_t> read_cgroup_oom_kills(const fs::path& root) {
  const auto mounts = read_mounts(root);
  for (const auto& group : groups_of(root, mounts, ""))
    if (auto count = read_count(group / "memory.events", "oom_kill")) return count;
  for (const auto& group : groups_of(root, mounts, "memory"))
    if (auto count = read_count(group / "memory.oom_control", "oom_kill")) return count;
  return std::nullopt;
}

}  // namespace lockstep
