#include "doctor/judge_gpus.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "doctor/machine.h"

namespace lockstep::tool {
namespace {

std::string memory_of(const Gpu& gpu) {
  return gpu.memory_bytes == 0 ? "memory unknown" : bytes_in_words(gpu.memory_bytes);
}

/// "2 x NVIDIA H200, 140 GiB each"; of GPUs that differ, each with its number.
std::string list(const std::vector<Gpu>& gpus) {
  const bool are_alike = std::all_of(gpus.begin(), gpus.end(), [&](const Gpu& gpu) { return gpu == gpus.front(); });
  if (are_alike)
    return fmt::format("{} x {}, {}{}", gpus.size(), gpus[0].name, memory_of(gpus[0]), gpus.size() > 1 ? " each" : "");
  std::vector<std::string> names;
  for (size_t index = 0; index < gpus.size(); ++index)
    names.push_back(fmt::format("{}: {} ({})", index, gpus[index].name, memory_of(gpus[index])));
  return fmt::format("{}", fmt::join(names, ", "));
}

/// All that are here, by the best source there is.
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

std::string in_words(size_t seen) {
  return seen == 0 ? "none" : fmt::to_string(seen);
}

/// Ok when it hides no more than it says.
Finding judge_visible_devices(const Gpus& gpus, const std::string& found) {
  const auto visible = visible_gpus(gpus);
  const bool is_meant = !visible.stray || *visible.stray == "-1";
  if (is_meant && !visible.gpus.empty()) return {"GPUs", Status::kOk, found};
  const std::string why = is_meant ? "" : fmt::format("there is no GPU {}, so ", *visible.stray);
  return {"GPUs", Status::kWarning,
          fmt::format("{}: {}CUDA sees {} of them", found, why, in_words(visible.gpus.size())),
          fmt::format("unset CUDA_VISIBLE_DEVICES, or name GPUs from {}", indices(gpus))};
}

}  // namespace

bool speaks_of_gpus(const Gpus& gpus, const Probe& probe) {
  return gpus.has_driver || gpus.device_files > 0 || gpus.has_smi || !probe.gpus.empty() || has_backend(probe, "nccl");
}

Finding judge_driver(const Gpus& gpus, const Probe& probe) {
  if (!gpus.smi_complaint.empty())
    return {"driver", Status::kWarning, fmt::format("nvidia-smi {}", gpus.smi_complaint),
            "reboot after an update of the driver; in a container, start it anew with --gpus all; `dmesg | grep NVRM` "
            "says more"};
  if (!gpus.installed.empty()) return {"driver", Status::kOk, gpus.installed[0].driver_version};
  if (gpus.device_files > 0 || !probe.gpus.empty())
    return {"driver", Status::kOk, "here, but nvidia-smi is not in PATH",
            "in a container, -e NVIDIA_DRIVER_CAPABILITIES=compute,utility: NCCL needs the library that comes with it"};
  if (gpus.has_driver)
    return {"driver", Status::kWarning, "loaded, but /dev has no nvidia0: this process may use no GPU",
            "in a container, docker run --gpus all; under Slurm, ask for GPUs (srun --gpus)"};
  return {"driver", Status::kWarning, "NVIDIA's is missing, and this build has nccl: ranks train on the CPU",
          "install the driver; in a container, docker run --gpus all"};
}

Finding judge_gpus(const Gpus& gpus, const Probe& probe, int ranks) {
  std::string found = list(gpus, probe);
  if (gpus.visible_devices) found += fmt::format("; CUDA_VISIBLE_DEVICES is \"{}\"", *gpus.visible_devices);
  if (!has_backend(probe, "nccl")) return {"GPUs", Status::kOk, found};
  if (!gpus.installed.empty())
    if (auto hidden = judge_visible_devices(gpus, found); hidden.status != Status::kOk) return hidden;
  const size_t seen = probe.gpus.size();
  if (seen == 0 || seen < visible_gpus(gpus).gpus.size())
    return {"GPUs", Status::kWarning,
            fmt::format("{}: a LibTorch for CUDA {} sees {} of them", found, probe.cuda_version, in_words(seen)),
            fmt::format("is the driver older than CUDA {} wants? nvidia-smi names the newest that it knows; does "
                        "CUDA_VISIBLE_DEVICES hide some, or MIG?",
                        probe.cuda_version)};
  const bool is_shown_its_own = seen == 1 && gpus.on_host >= ranks;  // as gpu_of_rank in src/comm sees it
  if (static_cast<size_t>(ranks) > seen && !is_shown_its_own)
    return {"GPUs", Status::kWarning, fmt::format("{}: {} for {} ranks, which train on the CPU", found, seen, ranks),
            fmt::format("start at most {} here; where each rank sees only its own GPU, set .device = cuda:0", seen)};
  return {"GPUs", Status::kOk, found};
}

Finding judge_compute_modes(const Gpus& gpus) {
  for (const char* mode : {"Prohibited", "Exclusive_Process"}) {
    std::vector<std::string> concerned;
    for (const auto& one : visible_gpus(gpus).gpus)
      if (one.compute_mode == mode) concerned.push_back(fmt::format("{} ({})", one.index, one.bus_id));
    if (concerned.empty()) continue;
    const bool is_closed = mode == std::string("Prohibited");
    return {"compute mode", is_closed ? Status::kError : Status::kWarning,
            fmt::format("{}: GPU {}; {}", mode, fmt::join(concerned, ", "),
                        is_closed ? "no process may use it" : "a second process on it fails"),
            "nvidia-smi -c DEFAULT, as root"};
  }
  return {"compute mode", Status::kOk, "any number of processes"};
}

}  // namespace lockstep::tool
