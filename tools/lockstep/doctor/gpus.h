#pragma once

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/environment.h>

#include "doctor/torch_probe.h"

namespace lockstep::tool {

/// A GPU that nvidia-smi lists, which is not asked by way of LibTorch and does not heed CUDA_VISIBLE_DEVICES.
struct InstalledGpu {
  int index = 0;
  Gpu gpu{};
  std::string bus_id{};  // "00000000:41:00.0"
  std::string driver_version{};
  std::string compute_mode{};  // "Default", "Exclusive_Process", "Prohibited"

  bool operator==(const InstalledGpu&) const = default;
};

/// What NVIDIA's driver says. Plain facts; check_gpus.h judges them.
struct Gpus {
  bool has_driver = false;    // the kernel has loaded it
  int device_files = 0;       // /dev/nvidia0 and so on
  int on_host = 0;            // that the driver has, also such as this process may not use
  bool has_smi = false;       // nvidia-smi is in PATH
  std::string smi_failure{};  // how it failed, and what it said
  std::vector<InstalledGpu> installed{};
  std::optional<std::string> visible_devices{};  // CUDA_VISIBLE_DEVICES
};

/// Asks nvidia-smi, which may take seconds, and after `limit` is given up. `root`: where /proc and /dev are.
Gpus read_gpus(const Environment::Lookup& lookup, std::chrono::milliseconds limit = std::chrono::seconds(20),
               const std::filesystem::path& root = "/");

/// What CUDA_VISIBLE_DEVICES leaves of the GPUs that are installed. CUDA reads it up to the first entry that names
/// none.
struct VisibleGpus {
  std::vector<InstalledGpu> gpus{};  // one that is named by its UUID is taken to exist, with that for its name
  std::optional<std::string> invalid_entry{};  // the entry that names none
};

VisibleGpus visible_gpus(const Gpus& gpus);

}  // namespace lockstep::tool
