#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <c10/core/Device.h>

namespace lockstep::detail {

struct GpuStatus {
  std::string name{};
  double utilization = 0;  // fraction of recent time in which a kernel ran, 0 to 1
  int64_t memory_used_bytes = 0;
  int64_t memory_total_bytes = 0;
};

/// Reads the figures of a GPU from the driver's management library (NVML), which is loaded when it is needed. Not
/// thread-safe.
class GpuMonitor {
 public:
  /// Returns null if the device is not a GPU, or if the library or the GPU is not found.
  static std::unique_ptr<GpuMonitor> open(c10::Device device);
  ~GpuMonitor();
  GpuMonitor(const GpuMonitor&) = delete;
  GpuMonitor& operator=(const GpuMonitor&) = delete;

  /// None if the library fails.
  std::optional<GpuStatus> read() const;

 private:
  struct Library;
  GpuMonitor(std::unique_ptr<Library> library, void* gpu);

  const std::unique_ptr<Library> library_;
  void* const gpu_;  // NVML's handle
};

}  // namespace lockstep::detail
