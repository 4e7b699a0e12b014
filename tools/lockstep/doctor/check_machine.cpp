#include "doctor/checks.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "doctor/machine.h"

namespace lockstep::tool {
namespace {

constexpr uint64_t kMebibyte = uint64_t{1} << 20;

std::string count(int number, const char* noun) {
  return fmt::format("{} {}{}", number, noun, number == 1 ? "" : "s");
}

/// "4", "2.5".
std::string format_cores(double cores) {
  return fmt::format("{:g}", std::round(cores * 100) / 100);
}

std::string format_limit(const std::optional<uint64_t>& limit) {
  return limit ? fmt::to_string(*limit) : "unlimited";
}

/// At least one core per rank.
int cores_per_rank(const Machine& machine, int ranks) {
  return std::max(1, static_cast<int>(usable_cores(machine)) / ranks);
}

std::string how_to_raise(const Ulimit& limit, uint64_t wanted, const char* flag, const char* name) {
  if (!limit.hard || *limit.hard >= wanted) return fmt::format("ulimit -{} {}", flag, wanted);
  return fmt::format(
      "raise the hard limit to {}: set {} in /etc/security/limits.conf, or use docker run --ulimit {}={}", wanted, name,
      name, wanted);
}

}  // namespace

Finding check_cores(const Machine& machine, int ranks) {
  const double usable = usable_cores(machine);
  std::string found = count(machine.cores, "core");
  if (machine.allowed_cores < machine.cores) found = fmt::format("{} of {}", machine.allowed_cores, found);
  if (usable < machine.allowed_cores) found += fmt::format(", limited to {} by the cgroup", format_cores(usable));
  if (usable < ranks)
    return {"cores", Status::kWarning, fmt::format("{}, for {}", found, count(ranks, "rank")),
            fmt::format("start at most {} here, or raise the limit (docker run --cpus, srun --cpus-per-task)",
                        count(std::max(1, static_cast<int>(usable)), "rank"))};
  return {"cores", Status::kOk, found};
}

Finding check_threads(const Machine& machine, int ranks, const std::optional<std::string>& variable) {
  const double usable = usable_cores(machine);
  const std::string remedy = fmt::format("export OMP_NUM_THREADS={}", cores_per_rank(machine, ranks));
  const auto set = variable ? to_integer(variable->substr(0, variable->find(','))) : std::nullopt;
  if (variable && (!set || *set == 0))
    return {"threads", Status::kWarning,
            fmt::format("OMP_NUM_THREADS is \"{}\", which is not a positive integer: OpenMP ignores it", *variable),
            remedy};
  const double threads = set ? static_cast<double>(*set) : machine.allowed_cores;
  const std::string found = set ? fmt::format("OMP_NUM_THREADS is {}", *set) : "OMP_NUM_THREADS is not set";
  if (threads * ranks > std::max(usable, 1.0) + 0.5)  // half a core too many is not worth a warning
    return {"threads", Status::kWarning,
            fmt::format("{}: {} with {:g} threads each share {} cores", found, count(ranks, "rank"), threads,
                        format_cores(usable)),
            remedy};
  return {"threads", Status::kOk, set ? found : found + "; lockstep run sets it to cores / ranks"};
}

Finding check_memory(const Machine& machine, int ranks) {
  const uint64_t usable = usable_memory_bytes(machine);
  const uint64_t total = std::min(machine.memory_bytes, machine.cgroup.memory_bytes.value_or(machine.memory_bytes));
  Finding finding{"memory", Status::kOk, fmt::format("{} of {} free", format_bytes(usable), format_bytes(total))};
  if (total < machine.memory_bytes) finding.found += ", the cgroup's limit";
  const uint64_t per_rank = usable / static_cast<uint64_t>(ranks);
  if (per_rank >= 1024 * kMebibyte) return finding;
  finding.status = per_rank < 256 * kMebibyte ? Status::kError : Status::kWarning;  // LibTorch alone uses that much
  finding.found += fmt::format(", for {}", count(ranks, "rank"));
  finding.remedy = "start fewer ranks here, or raise the limit (docker run --memory, srun --mem)";
  return finding;
}

Finding check_numa(const Machine& machine, int ranks) {
  const std::string found = count(machine.numa_nodes, "node");
  if (machine.allowed_numa_nodes == 1) return {"NUMA", Status::kOk, found};
  if (ranks == 1) return {"NUMA", Status::kOk, found, "use lockstep run --bind to keep each rank on one node"};
  return {"NUMA", Status::kWarning,
          fmt::format("{}, and this process may run on {} of them", found, machine.allowed_numa_nodes),
          "use lockstep run --bind, or numactl --cpunodebind: memory of another node is slower"};
}

Finding check_shared_memory(const Machine& machine, bool serves_nccl) {
  const std::string remedy =
      "use docker run --shm-size=1g or --ipc=host; outside containers, mount -o remount,size=1g /dev/shm";
  if (!machine.shared_memory)
    return {"shared memory", Status::kWarning, "/dev/shm is missing: NCCL and ranks in different containers need it",
            remedy};
  const auto& space = *machine.shared_memory;
  const std::string found =
      fmt::format("/dev/shm has {} of {} free", format_bytes(space.free_bytes), format_bytes(space.total_bytes));
  if (!serves_nccl) return {"shared memory", Status::kOk, found};
  const std::string without = "; or set NCCL_SHM_DISABLE=1, which is slower";
  if (space.total_bytes <= 64 * kMebibyte)
    return {"shared memory", Status::kWarning, found + ", Docker's default: too small for NCCL", remedy + without};
  if (space.free_bytes < 64 * kMebibyte)
    return {"shared memory", Status::kWarning, found + ": too small for NCCL",
            "remove files that dead programs left in /dev/shm; or " + remedy + without};
  return {"shared memory", Status::kOk, found};
}

Finding check_open_files(const Machine& machine, int world_size) {
  constexpr uint64_t kRecommended = 1024;
  const uint64_t needed = 256 + 4 * static_cast<uint64_t>(world_size);  // a socket per rank, in a few groups
  const auto& limit = machine.open_files;
  const std::string found = format_limit(limit.soft);
  const uint64_t wanted = std::max<uint64_t>(4096, needed);
  if (limit.soft && *limit.soft < needed)
    return {"open files", Status::kError, fmt::format("{}; {} need about {}", found, count(world_size, "rank"), needed),
            how_to_raise(limit, wanted, "n", "nofile")};
  if (limit.soft && *limit.soft < kRecommended)
    return {"open files", Status::kWarning, fmt::format("{}, below the usual {}", found, kRecommended),
            how_to_raise(limit, wanted, "n", "nofile")};
  return {"open files", Status::kOk, found};
}

Finding check_processes(const Machine& machine, int ranks) {
  const auto user_limit = machine.is_root ? std::nullopt : machine.processes.soft;
  const auto& cgroups = machine.cgroup.processes;
  const bool is_cgroups = cgroups && (!user_limit || *cgroups < *user_limit);
  const auto limit = is_cgroups ? cgroups : user_limit;
  const std::string found = is_cgroups ? fmt::format("{}, the cgroup's limit", *limit) : format_limit(limit);
  // LibTorch has two thread pools with one thread per core each; the rest is for lockstep and the launcher.
  const uint64_t needed = static_cast<uint64_t>(ranks) * (2 * static_cast<uint64_t>(machine.allowed_cores) + 16) + 64;
  const uint64_t wanted = std::max<uint64_t>(4096, 2 * needed);
  const std::string remedy = is_cgroups ? fmt::format("docker run --pids-limit {}, or TasksMax= of the service", wanted)
                                        : how_to_raise(machine.processes, wanted, "u", "nproc");
  if (limit && *limit < needed)
    return {"processes", Status::kError,
            fmt::format("{}; {} need about {}, threads included", found, count(ranks, "rank"), needed), remedy};
  if (limit && *limit < 2 * needed)
    return {"processes", Status::kWarning,
            fmt::format("{}; {} need about {}, and the user's other processes count too", found, count(ranks, "rank"),
                        needed),
            remedy};
  return {"processes", Status::kOk, found};
}

Finding check_locked_memory(const Machine& machine) {
  const auto& limit = machine.locked_memory.soft;
  const std::string found = limit ? format_bytes(*limit) : "unlimited";
  if (limit && machine.has_infiniband)
    return {"locked memory", Status::kWarning, found + ": InfiniBand locks all memory that it sends from",
            "set memlock unlimited in /etc/security/limits.conf, then ulimit -l unlimited; in a container, docker run "
            "--ulimit memlock=-1"};
  return {"locked memory", Status::kOk, limit ? found + ", sufficient without InfiniBand" : found};
}

Finding check_clock(const Machine& machine, bool spans_hosts) {
  const auto& clock = machine.clock;
  const std::string remedy = "timedatectl set-ntp true, or start chrony";
  if (clock.year < 2024)
    return {"clock", Status::kError,
            fmt::format("the clock says {}: logs and checkpoints would be misordered", clock.year), remedy};
  if (clock.is_synchronized) return {"clock", Status::kOk, "synchronized by NTP"};
  if (spans_hosts)
    return {"clock", Status::kWarning,
            "not synchronized by NTP: times in the logs of different hosts cannot be compared", remedy};
  return {"clock", Status::kOk, "not synchronized by NTP, which matters only between hosts"};
}

}  // namespace lockstep::tool
