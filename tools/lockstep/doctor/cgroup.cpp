#include "doctor/cgroup.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "doctor/files.h"

namespace lockstep::tool {
namespace {

namespace fs = std::filesystem;

/// The folders of one controller, from this process's group up to where the hierarchy is mounted.
using Groups = std::vector<fs::path>;

struct Mount {
  fs::path shown;  // the group that the mount point stands for
  fs::path point;
  bool is_v2 = false;
  std::string options;
};

std::vector<Mount> read_mounts(const fs::path& root) {
  std::vector<Mount> mounts;
  std::ifstream file(root / "proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string skipped, shown, point, type;
    words >> skipped >> skipped >> skipped >> shown >> point;
    while (words >> skipped && skipped != "-") continue;  // optional fields end with a dash
    Mount mount;
    words >> type >> skipped >> mount.options;
    mount.shown = shown;
    mount.point = root / fs::path(point).relative_path();
    mount.is_v2 = type == "cgroup2";
    if (mount.is_v2 || type == "cgroup") mounts.push_back(mount);
  }
  return mounts;
}

bool lists(const std::string& options, const std::string& controller) {
  return ("," + options + ",").find("," + controller + ",") != std::string::npos;
}

Groups ascend(const Mount& mount, const fs::path& group) {
  const fs::path below = group.lexically_relative(mount.shown);
  Groups groups;
  // Outside of what is mounted, as in a container that was given only its own group: the mount point is that group.
  if (!below.empty() && below != "." && *below.begin() != "..")
    for (fs::path folder = mount.point / below; folder != mount.point; folder = folder.parent_path())
      groups.push_back(folder);
  groups.push_back(mount.point);
  return groups;
}

/// `controller` empty: the one hierarchy of v2.
Groups groups_of(const fs::path& root, const std::vector<Mount>& mounts, const std::string& controller) {
  std::ifstream file(root / "proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // "4:cpu,cpuacct:/path", of v2 "0::/path"
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (controller.empty() ? !controllers.empty() : !lists(controllers, controller)) continue;
    for (const auto& mount : mounts)
      if (controller.empty() ? mount.is_v2 : !mount.is_v2 && lists(mount.options, controller))
        return ascend(mount, line.substr(second + 1));
  }
  return {};
}

template <class Number>
void lower(std::optional<Number>& limit, Number candidate) {
  limit = limit ? std::min(*limit, candidate) : candidate;
}

void read_cores(const Groups& v2, const Groups& v1, CgroupLimits& limits) {
  for (const auto& group : v2) {  // "200000 100000" or "max 100000"
    std::istringstream words(read_text(group / "cpu.max"));
    double quota = 0, period = 0;
    if (words >> quota >> period && period > 0) lower(limits.cores, quota / period);
  }
  for (const auto& group : v1) {
    const auto quota = read_integer(group / "cpu.cfs_quota_us");  // -1: none, which is no unsigned number
    const auto period = read_integer(group / "cpu.cfs_period_us");
    if (quota && period && *period > 0) lower(limits.cores, static_cast<double>(*quota) / static_cast<double>(*period));
  }
}

uint64_t droppable(const fs::path& group, const std::string& name) {
  std::ifstream file(group / "memory.stat");
  uint64_t bytes = 0;
  for (std::string word; file >> word >> bytes;)
    if (word == name) return bytes;
  return 0;
}

void read_memory(const Groups& groups, const std::string& limit_name, const std::string& used_name,
                 const std::string& droppable_name, CgroupLimits& limits) {
  constexpr uint64_t kUnlimited = uint64_t{1} << 60;  // v1 writes "none" as a number near 2^63
  for (const auto& group : groups) {
    const auto limit = read_integer(group / limit_name);
    if (!limit || *limit >= limits.memory_bytes.value_or(kUnlimited)) continue;
    const uint64_t used = read_integer(group / used_name).value_or(0);
    limits.memory_bytes = limit;
    limits.memory_used_bytes = used - std::min(used, droppable(group, droppable_name));
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

}  // namespace lockstep::tool
