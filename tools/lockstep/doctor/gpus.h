#pragma once

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/environment.h>

#include "doctor/torch_probe.h"

namespace lockstep::tool {

/// A GPU as listed by nvidia-smi, which ignores CUDA_VISIBLE_DEVICES.
struct InstalledGpu {
  int index = 0;
  Gpu gpu{};
  std::string bus_id{};  // "00000000:41:00.0"
  std::string driver_version{};
  std::string compute_mode{};  // "Default", "Exclusive_Process", "Prohibited"

  bool operator==(const InstalledGpu&) const = default;
};

/// Facts about the GPUs and NVIDIA's driver; input of the checks.
struct Gpus {
  bool has_driver = false;    // loaded into the kernel
  int device_files = 0;       // /dev/nvidia0 and so on
  int on_host = 0;            // GPUs of the driver, including those this process may not use
  bool has_smi = false;       // nvidia-smi is in PATH
  std::string smi_failure{};  // how nvidia-smi failed, with its message
  std::vector<InstalledGpu> installed{};
  std::optional<std::string> visible_devices{};  // CUDA_VISIBLE_DEVICES
};

/// Runs nvidia-smi, which may take seconds; kills it after `limit`. `root` is the folder that contains proc and dev,
/// for tests.
Gpus read_gpus(const Environment::Lookup& lookup, std::chrono::milliseconds limit = std::chrono::seconds(20),
               const std::filesystem::path& root = "/");

/// The installed GPUs that CUDA_VISIBLE_DEVICES leaves visible. CUDA reads the list up to the first invalid entry.
struct VisibleGpus {
  std::vector<InstalledGpu> gpus{};            // a UUID is assumed to exist and becomes the name
  std::optional<std::string> invalid_entry{};  // the first entry that names no GPU
};

VisibleGpus visible_gpus(const Gpus& gpus);

}  // namespace lockstep::tool
