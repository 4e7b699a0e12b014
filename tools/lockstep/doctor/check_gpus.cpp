#include "doctor/checks.h"

#include <algorithm>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "doctor/machine.h"

namespace lockstep::tool {
namespace {

std::string memory_of(const Gpu& gpu) {
  return gpu.memory_bytes == 0 ? "memory unknown" : format_bytes(gpu.memory_bytes);
}

/// "2 x NVIDIA H200, 140 GiB each"; GPUs that differ are listed one by one.
std::string list(const std::vector<Gpu>& gpus) {
  const bool are_alike = std::all_of(gpus.begin(), gpus.end(), [&](const Gpu& gpu) { return gpu == gpus.front(); });
  if (are_alike)
    return fmt::format("{} x {}, {}{}", gpus.size(), gpus[0].name, memory_of(gpus[0]), gpus.size() > 1 ? " each" : "");
  std::vector<std::string> names;
  for (size_t index = 0; index < gpus.size(); ++index)
    names.push_back(fmt::format("{}: {} ({})", index, gpus[index].name, memory_of(gpus[index])));
  return fmt::format("{}", fmt::join(names, ", "));
}

/// All GPUs of this host, from the best source available: nvidia-smi, LibTorch, /dev.
std::string list(const Gpus& gpus, const Probe& probe) {
  std::vector<Gpu> installed;
  for (const auto& one : gpus.installed) installed.push_back(one.gpu);
  if (!installed.empty()) return list(installed);
  return probe.gpus.empty() ? fmt::format("{} in /dev", gpus.device_files) : list(probe.gpus);
}

/// "0 to 7".
std::string indices(const Gpus& gpus) {
  const auto& all = gpus.installed;
  return all.size() == 1 ? fmt::to_string(all[0].index) : fmt::format("{} to {}", all.front().index, all.back().index);
}

std::string format_count(size_t seen) {
  return seen == 0 ? "none" : fmt::to_string(seen);
}

/// Ok if every entry of CUDA_VISIBLE_DEVICES, up to a deliberate -1, names a GPU and at least one GPU is visible.
Finding check_visible_devices(const Gpus& gpus, const std::string& found) {
  const auto visible = visible_gpus(gpus);
  const bool is_intended = !visible.invalid_entry || *visible.invalid_entry == "-1";
  if (is_intended && !visible.gpus.empty()) return {"GPUs", Status::kOk, found};
  const std::string why = is_intended ? "" : fmt::format("there is no GPU {}, so ", *visible.invalid_entry);
  return {"GPUs", Status::kWarning,
          fmt::format("{}: {}CUDA sees {} of them", found, why, format_count(visible.gpus.size())),
          fmt::format("unset CUDA_VISIBLE_DEVICES, or list GPUs from {}", indices(gpus))};
}

/// Whether NCCL_SOCKET_IFNAME allows the interface: "eth,ib" are prefixes of names, "=eth0" are exact names, and a
/// leading "^" excludes the matches.
bool allows(std::string pattern, const std::string& name) {
  const bool excludes = pattern.starts_with('^');
  if (excludes) pattern.erase(0, 1);
  const bool is_exact = pattern.starts_with('=');
  if (is_exact) pattern.erase(0, 1);
  std::istringstream entries(pattern);
  for (std::string entry; std::getline(entries, entry, ',');) {
    const std::string wanted = entry.substr(0, entry.find(':'));  // a port may follow
    if (!wanted.empty() && (is_exact ? name == wanted : name.starts_with(wanted))) return !excludes;
  }
  return excludes;
}

bool can_be_used(const Interface& interface) {
  return interface.is_up && !interface.addresses.empty();
}

}  // namespace

bool gpus_are_relevant(const Gpus& gpus, const Probe& probe) {
  return gpus.has_driver || gpus.device_files > 0 || gpus.has_smi || !probe.gpus.empty() || has_backend(probe, "nccl");
}

Finding check_driver(const Gpus& gpus, const Probe& probe) {
  if (!gpus.smi_failure.empty())
    return {"driver", Status::kWarning, fmt::format("nvidia-smi {}", gpus.smi_failure),
            "reboot after a driver update; in a container, restart it with --gpus all; see `dmesg | grep NVRM` for "
            "details"};
  if (!gpus.installed.empty()) return {"driver", Status::kOk, gpus.installed[0].driver_version};
  if (gpus.device_files > 0 || !probe.gpus.empty())
    return {"driver", Status::kOk, "found, but nvidia-smi is not in PATH",
            "in a container, set -e NVIDIA_DRIVER_CAPABILITIES=compute,utility: NCCL needs NVML, which utility adds"};
  if (gpus.has_driver)
    return {"driver", Status::kWarning, "loaded, but /dev has no nvidia0: this process cannot use a GPU",
            "in a container, use docker run --gpus all; under Slurm, request GPUs (srun --gpus)"};
  return {"driver", Status::kWarning, "no NVIDIA driver, although this build has nccl: ranks train on the CPU",
          "install the driver; in a container, use docker run --gpus all"};
}

Finding check_gpus(const Gpus& gpus, const Probe& probe, int ranks) {
  std::string found = list(gpus, probe);
  if (gpus.visible_devices) found += fmt::format("; CUDA_VISIBLE_DEVICES is \"{}\"", *gpus.visible_devices);
  if (!has_backend(probe, "nccl")) return {"GPUs", Status::kOk, found};
  if (!gpus.installed.empty())
    if (auto hidden = check_visible_devices(gpus, found); hidden.status != Status::kOk) return hidden;
  const size_t seen = probe.gpus.size();
  if (seen == 0 || seen < visible_gpus(gpus).gpus.size())
    return {"GPUs", Status::kWarning,
            fmt::format("{}: a LibTorch for CUDA {} sees {} of them", found, probe.cuda_version, format_count(seen)),
            fmt::format("check that the driver supports CUDA {} (nvidia-smi prints the newest version it supports), "
                        "and that neither CUDA_VISIBLE_DEVICES nor MIG hides GPUs",
                        probe.cuda_version)};
  const bool sees_only_own = seen == 1 && gpus.on_host >= ranks;  // as gpu_of_rank in src/comm sees it
  if (static_cast<size_t>(ranks) > seen && !sees_only_own)
    return {"GPUs", Status::kWarning,
            fmt::format("{}: {} for {} ranks, so the ranks train on the CPU", found, seen, ranks),
            fmt::format("start at most {} ranks here; if each rank sees only its own GPU, set .device = cuda:0", seen)};
  return {"GPUs", Status::kOk, found};
}

Finding check_compute_modes(const Gpus& gpus) {
  for (const char* mode : {"Prohibited", "Exclusive_Process"}) {
    std::vector<std::string> gpus_in_mode;
    for (const auto& one : visible_gpus(gpus).gpus)
      if (one.compute_mode == mode) gpus_in_mode.push_back(fmt::format("{} ({})", one.index, one.bus_id));
    if (gpus_in_mode.empty()) continue;
    const bool is_prohibited = mode == std::string("Prohibited");
    return {"compute mode", is_prohibited ? Status::kError : Status::kWarning,
            fmt::format("{}: GPU {}; {}", mode, fmt::join(gpus_in_mode, ", "),
                        is_prohibited ? "no process can use it" : "a second process on it fails"),
            "nvidia-smi -c DEFAULT, as root"};
  }
  return {"compute mode", Status::kOk, "any number of processes"};
}

Finding check_nccl(const Probe& probe) {
  if (has_backend(probe, "nccl"))
    return {"NCCL", Status::kOk, fmt::format("{}, for CUDA {}", probe.nccl_version, probe.cuda_version)};
  if (!probe.has_cuda)
    return {"NCCL", Status::kWarning, "not in this build, whose LibTorch has no CUDA: ranks train on the CPU",
            "install a CUDA build of PyTorch or LibTorch, then rebuild lockstep with CMAKE_PREFIX_PATH set to it"};
  return {"NCCL", Status::kWarning, "not in this build: ranks train on the CPU",
          fmt::format("apt-get install libnccl-dev, install the headers of CUDA {}, then rebuild lockstep",
                      probe.cuda_version)};
}

Finding check_nccl_interface(const std::string& named, const Network& network, bool spans_hosts) {
  constexpr const char* kCheck = "NCCL's network";
  const std::string found = fmt::format("NCCL_SOCKET_IFNAME is \"{}\"", named);
  const std::string remedy = "unset it, or name an interface that the other hosts can reach";
  const auto& all = network.interfaces;
  // NCCL bootstraps over the first match. An exclusion list that does not name lo allows lo.
  const auto first = std::find_if(all.begin(), all.end(),
                                  [&](const Interface& one) { return can_be_used(one) && allows(named, one.name); });
  if (first == all.end()) {
    std::vector<std::string> names;
    for (const auto& one : all)
      if (can_be_used(one)) names.push_back(one.name);
    return {kCheck, Status::kError,
            fmt::format("{}, which matches none of the interfaces of this host: {}", found, fmt::join(names, ", ")),
            remedy};
  }
  if (spans_hosts && is_loopback({.addresses = first->addresses}))
    return {kCheck, Status::kError,
            fmt::format("{}, so NCCL uses {}, which no other host can reach", found, first->name),
            named.starts_with('^') ? fmt::format("NCCL_SOCKET_IFNAME={},lo", named) : remedy};
  return {kCheck, Status::kOk, fmt::format("{}, selected by NCCL_SOCKET_IFNAME=\"{}\"", first->name, named)};
}

Finding check_nccl_variables(const Variables& nccl, size_t gpus, bool has_infiniband) {
  if (nccl.empty()) return {"NCCL variables", Status::kOk, "none set"};
  std::vector<std::string> shown, slow;
  for (const auto& [name, value] : nccl) shown.push_back(fmt::format("{}={}", name, value));
  if (gpus > 1 && is_on(nccl, "NCCL_P2P_DISABLE")) slow.push_back("NCCL_P2P_DISABLE");
  if (has_infiniband && is_on(nccl, "NCCL_IB_DISABLE")) slow.push_back("NCCL_IB_DISABLE");
  const std::string found(fmt::format("{}", fmt::join(shown, ", ")));
  if (slow.empty()) return {"NCCL variables", Status::kOk, found};
  return {"NCCL variables", Status::kWarning,
          fmt::format("{}: NCCL uses a slower transport than this machine offers", found),
          fmt::format("unset {}, unless NCCL hangs without it", fmt::join(slow, " "))};
}

bool is_on(const Variables& nccl, const std::string& name) {
  const auto found = nccl.find(name);
  return found != nccl.end() && to_integer(found->second).value_or(0) != 0;
}

}  // namespace lockstep::tool
