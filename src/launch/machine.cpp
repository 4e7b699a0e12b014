#include "launch/machine.h"

#include <dirent.h>
#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <memory>
#include <sstream>

#include "base/text.h"

namespace lockstep {
namespace {

/// The number behind "name " in a file of such lines.
std::optional<int64_t> find_count(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  std::string word;
  for (int64_t count = 0; file >> word >> count;)
    if (word == name) return count;
  return std::nullopt;
}

/// Of version 2: "max 100000" or "150000 100000".
std::optional<double> quota_2(const std::string& group) {
  std::ifstream file(group + "/cpu.max");
  double quota = 0, period = 0;
  if (file >> quota >> period && period > 0) return quota / period;
  return std::nullopt;
}

std::optional<double> quota_1(const std::string& group) {
  double quota = 0, period = 0;
  std::ifstream(group + "/cpu.cfs_quota_us") >> quota;
  std::ifstream(group + "/cpu.cfs_period_us") >> period;
  if (quota > 0 && period > 0) return quota / period;
  return std::nullopt;
}

bool is_device(const std::string& name) {
  constexpr std::string_view kPrefix = "nvidia";
  return name.starts_with(kPrefix) && parse_number<int>(std::string_view(name).substr(kPrefix.size()));
}

}  // namespace

Machine::Machine(std::string root) : root_(std::move(root)) {}

std::vector<int> Machine::cores() const {
  std::vector<int> result;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return {0};
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(static_cast<size_t>(core), &set)) result.push_back(core);
  return result;
}

/// The folders of this process's group and of those around it, innermost first; "" is the controller of version 2.
std::vector<std::string> Machine::groups_of(const std::string& controller) const {
  const std::string top = root_ + "/sys/fs/cgroup" + (controller.empty() ? "" : "/" + controller);
  std::vector<std::string> folders;
  std::ifstream file(root_ + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // "4:cpu,cpuacct:/a/b", of version 2 "0::/a/b"
    auto first = line.find(':'), second = line.find(':', first + 1);
    if (second == line.npos) continue;
    std::string names = "," + line.substr(first + 1, second - first - 1) + ",";
    if (controller.empty() ? names != ",," : names.find("," + controller + ",") == names.npos) continue;
    for (std::string path = line.substr(second + 1); path.size() > 1; path.resize(path.rfind('/')))
      folders.push_back(top + path);
  }
  folders.push_back(top);
  return folders;
}

int Machine::usable_cores() const {
  double most = static_cast<double>(cores().size());
  for (const auto& group : groups_of(""))
    if (auto quota = quota_2(group)) most = std::min(most, *quota);
  for (const auto& group : groups_of("cpu"))
    if (auto quota = quota_1(group)) most = std::min(most, *quota);
  return std::max(1, static_cast<int>(std::floor(most)));
}

int Machine::gpus(const Environment::Lookup& lookup) const {
  if (auto visible = lookup("CUDA_VISIBLE_DEVICES")) {
    int count = 0;
    std::istringstream entries(*visible);
    for (std::string entry; std::getline(entries, entry, ',');) {
      if (entry.empty() || entry == "-1") break;  // as CUDA reads it: what comes after does not count
      ++count;
    }
    return count;
  }
  int count = 0;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir((root_ + "/dev").c_str()), &::closedir);
  while (const dirent* entry = folder ? ::readdir(folder.get()) : nullptr) count += is_device(entry->d_name);
  return count;
}

std::optional<int64_t> Machine::out_of_memory_kills() const {
  for (const auto& group : groups_of(""))
    if (auto count = find_count(group + "/memory.events", "oom_kill")) return count;
  for (const auto& group : groups_of("memory"))
    if (auto count = find_count(group + "/memory.oom_control", "oom_kill")) return count;
  return std::nullopt;
}

std::vector<std::vector<int>> deal_cores(const std::vector<int>& cores, int workers) {
  std::vector<std::vector<int>> dealt(static_cast<size_t>(workers));
  const size_t count = cores.size(), hands = dealt.size();
  if (count < hands) return dealt;
  for (size_t hand = 0; hand < hands; ++hand)
    for (size_t core = count * hand / hands; core < count * (hand + 1) / hands; ++core)
      dealt[hand].push_back(cores[core]);
  return dealt;
}

}  // namespace lockstep
