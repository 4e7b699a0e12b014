#include "backends/nccl/gpu.h"

#include <array>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

namespace lockstep::nccl {

int visible_gpus() {
  return c10::cuda::device_count();
}

std::string bus_id(c10::Device gpu) {
  std::array<char, 32> id{};
  C10_CUDA_CHECK(cudaDeviceGetPCIBusId(id.data(), static_cast<int>(id.size()), gpu.index()));
  return id.data();
}

std::string compute_capability(c10::Device gpu) {
  int major = 0, minor = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu.index()));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, gpu.index()));
  return std::to_string(major) + "." + std::to_string(minor);
}

void make_current(c10::Device gpu) {
  c10::cuda::set_device(gpu.index());
}

bool is_capturing(c10::Device gpu) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(gpu.index()), &status));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace lockstep::nccl
