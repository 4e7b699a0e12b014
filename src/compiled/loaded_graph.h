#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

namespace lockstep::detail {

/// A graph of a compiled file: a shared library that AOTInductor has generated. Not thread-safe.
class LoadedGraph {
 public:
  /// Loads the graph of this name from the file. Throws CheckpointError if it cannot be loaded. `matmul_precision` is
  /// that of its products of float32 matrices, which LibTorch computes: "highest", "high" or "medium".
  LoadedGraph(const std::string& path, const std::string& name, c10::Device device, std::string matmul_precision);

  /// Calls the graph, on a GPU on the current stream. An argument that the caller does not hold as well is freed as
  /// soon as the graph needs it no more.
  std::vector<at::Tensor> run(std::vector<at::Tensor> arguments);

 private:
  const c10::Device device_;
  const std::string matmul_precision_;
  torch::inductor::AOTIModelPackageLoader loader_;
};

}  // namespace lockstep::detail
