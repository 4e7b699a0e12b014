#include "doctor/machine.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/timex.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <fmt/format.h>

namespace lockstep::tool {
namespace {

namespace fs = std::filesystem;

/// The value of the line that starts with `name` in /proc/cpuinfo, /proc/meminfo or os-release.
std::string value_in(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(name)) continue;
    const auto from = line.find_first_not_of("\t :=\"", name.size());
    const auto to = line.find_last_not_of(" \"");
    if (from != std::string::npos && to >= from) return line.substr(from, to - from + 1);
  }
  return "";
}

std::string read_cpu_model() {
  if (auto model = value_in("/proc/cpuinfo", "model name"); !model.empty()) return model;
  // On arm64 the kernel reports only numbers.
  static const std::map<std::string, std::string> kArm{
      {"0xd0c", "Neoverse N1"}, {"0xd40", "Neoverse V1"}, {"0xd49", "Neoverse N2"}, {"0xd4f", "Neoverse V2"},
      {"0xd83", "Neoverse V3"}, {"0xd8e", "Neoverse N3"}, {"0xd08", "Cortex-A72"},  {"0xd0b", "Cortex-A76"}};
  const auto maker = value_in("/proc/cpuinfo", "CPU implementer");
  const auto part = value_in("/proc/cpuinfo", "CPU part");
  if (maker.empty() && part.empty()) return "unknown";
  const auto known = kArm.find(part);
  if (maker == "0x41" && known != kArm.end()) return "ARM " + known->second;
  return fmt::format("implementer {}, part {}", maker, part);
}

uint64_t memory_in(const std::string& name) {
  std::istringstream words(value_in("/proc/meminfo", name));
  uint64_t kibibytes = 0;
  words >> kibibytes;
  return kibibytes * 1024;
}

/// The cores in the affinity mask. The mask has the size of the system, since cpu_set_t ends at 1024 cores.
std::set<int> read_allowed_cores() {
  const int possible = std::max<int>(1024, static_cast<int>(::sysconf(_SC_NPROCESSORS_CONF)));
  const auto release = [](cpu_set_t* cores) { CPU_FREE(cores); };
  const std::unique_ptr<cpu_set_t, decltype(release)> cores(CPU_ALLOC(possible), release);
  std::set<int> allowed;
  if (!cores || ::sched_getaffinity(0, CPU_ALLOC_SIZE(possible), cores.get()) != 0) return allowed;
  for (int core = 0; core < possible; ++core)
    if (CPU_ISSET_S(core, CPU_ALLOC_SIZE(possible), cores.get())) allowed.insert(core);
  return allowed;
}

/// Whether a list such as "0-3,8" contains one of the cores.
bool names_any(const std::string& list, const std::set<int>& cores) {
  std::istringstream ranges(list);
  for (std::string range; std::getline(ranges, range, ',');) {
    int first = 0, last = 0;
    char dash = 0;
    std::istringstream numbers(range);
    if (!(numbers >> first)) continue;
    if (!(numbers >> dash >> last)) last = first;
    const auto from = cores.lower_bound(first);
    if (from != cores.end() && *from <= last) return true;
  }
  return false;
}

void read_numa(const std::set<int>& allowed_cores, Machine& machine) {
  int nodes = 0, allowed = 0;
  std::error_code missing;
  for (const auto& entry : fs::directory_iterator("/sys/devices/system/node", missing)) {
    const std::string cores = read_text(entry.path() / "cpulist");
    if (cores.empty()) continue;  // not a node, or a node without cores
    ++nodes;
    if (names_any(cores, allowed_cores)) ++allowed;
  }
  machine.numa_nodes = std::max(nodes, 1);
  machine.allowed_numa_nodes = std::max(allowed, 1);
}

Ulimit read_ulimit(__rlimit_resource resource) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0) return {};
  const auto bound = [](rlim_t value) {
    return value == RLIM_INFINITY ? std::nullopt : std::optional<uint64_t>(value);
  };
  return {bound(limit.rlim_cur), bound(limit.rlim_max)};
}

SystemClock read_clock() {
  SystemClock clock;
  const time_t now = ::time(nullptr);
  tm parts{};
  if (::gmtime_r(&now, &parts)) clock.year = parts.tm_year + 1900;
  timex state{};
  const int answer = ::adjtimex(&state);  // without a mode it only reads
  clock.is_synchronized = answer >= 0 && answer != TIME_ERROR && (state.status & STA_UNSYNC) == 0;
  return clock;
}

bool has_entries(const char* folder) {
  std::error_code missing;
  return fs::directory_iterator(folder, missing) != fs::directory_iterator();
}

}  // namespace

std::optional<Space> space_at(const std::string& path) {
  struct statvfs status {};
  if (::statvfs(path.c_str(), &status) != 0) return std::nullopt;
  return Space{uint64_t{status.f_blocks} * status.f_frsize, uint64_t{status.f_bavail} * status.f_frsize};
}

Machine read_machine() {
  Machine machine;
  utsname names{};
  ::uname(&names);
  machine.system = value_in("/etc/os-release", "PRETTY_NAME");
  if (machine.system.empty()) machine.system = names.sysname;
  machine.kernel = names.release;
  machine.architecture = names.machine;
  machine.cpu_model = read_cpu_model();
  const auto allowed = read_allowed_cores();
  machine.cores = std::max<int>(1, static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN)));
  machine.allowed_cores = allowed.empty() ? machine.cores : static_cast<int>(allowed.size());
  read_numa(allowed, machine);
  machine.memory_bytes = memory_in("MemTotal");
  machine.available_memory_bytes = memory_in("MemAvailable");
  machine.cgroup = read_cgroup_limits();
  machine.open_files = read_ulimit(RLIMIT_NOFILE);
  machine.processes = read_ulimit(RLIMIT_NPROC);
  machine.locked_memory = read_ulimit(RLIMIT_MEMLOCK);
  machine.is_root = ::geteuid() == 0;
  machine.has_infiniband = has_entries("/sys/class/infiniband");
  machine.shared_memory = space_at("/dev/shm");
  machine.clock = read_clock();
  return machine;
}

double usable_cores(const Machine& machine) {
  return std::min<double>(machine.allowed_cores, machine.cgroup.cores.value_or(machine.allowed_cores));
}

uint64_t usable_memory_bytes(const Machine& machine) {
  const auto& cgroup = machine.cgroup;
  if (!cgroup.memory_bytes) return machine.available_memory_bytes;
  const uint64_t left = *cgroup.memory_bytes - std::min(*cgroup.memory_bytes, cgroup.memory_used_bytes);
  return std::min(machine.available_memory_bytes, left);
}

std::string format_bytes(uint64_t bytes) {
  const char* const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  double amount = static_cast<double>(bytes);
  size_t unit = 0;
  for (; amount >= 1024 && unit + 1 < std::size(units); ++unit) amount /= 1024;
  const bool is_whole = unit == 0 || amount >= 100 || amount == static_cast<double>(static_cast<uint64_t>(amount));
  return is_whole ? fmt::format("{:.0f} {}", amount, units[unit]) : fmt::format("{:.1f} {}", amount, units[unit]);
}

}  // namespace lockstep::tool
