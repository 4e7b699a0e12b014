#include "launch/machine.h"

#include <dirent.h>
#include <sched.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <sstream>

#include "base/cgroup.h"
#include "base/text.h"

namespace lockstep {
namespace {

bool is_device(const std::string& name) {
  constexpr std::string_view kPrefix = "nvidia";
  return name.starts_with(kPrefix) && parse_number<int>(std::string_view(name).substr(kPrefix.size()));
}

}  // namespace

Machine::Machine(std::filesystem::path root) : root_(std::move(root)) {}

std::vector<int> Machine::cores() const {
  std::vector<int> result;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return {0};
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(static_cast<size_t>(core), &set)) result.push_back(core);
  return result;
}

int Machine::usable_cores() const {
  const double allowed = static_cast<double>(cores().size());
  const double quota = read_cgroup_limits(root_).cores.value_or(allowed);
  return std::max(1, static_cast<int>(std::floor(std::min(allowed, quota))));
}

int Machine::gpus(const Environment::Lookup& lookup) const {
  if (auto visible = lookup("CUDA_VISIBLE_DEVICES")) {
    int count = 0;
    std::istringstream entries(*visible);
    for (std::string entry; std::getline(entries, entry, ',');) {
      if (entry.empty() || entry == "-1") break;  // like CUDA, ignore the entries after it
      ++count;
    }
    return count;
  }
  int count = 0;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir((root_ / "dev").c_str()), &::closedir);
  while (const dirent* entry = folder ? ::readdir(folder.get()) : nullptr) count += is_device(entry->d_name);
  return count;
}

std::optional<int64_t> Machine::out_of_memory_kills() const {
  return read_cgroup_oom_kills(root_);
}

std::vector<std::vector<int>> assign_cores(const std::vector<int>& cores, int workers) {
  std::vector<std::vector<int>> result(static_cast<size_t>(workers));
  const size_t count = cores.size(), sets = result.size();
  if (count < sets) return result;
  for (size_t worker = 0; worker < sets; ++worker)
    for (size_t core = count * worker / sets; core < count * (worker + 1) / sets; ++core)
      result[worker].push_back(cores[core]);
  return result;
}

}  // namespace lockstep
