#pragma once

#include <memory>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/data_parallel.h>

#include "parallel/data_parallel/device_threads.h"

namespace lockstep::detail {

/// A module on the first device and its copies on the other devices. Not thread-safe.
class ModuleReplicas {
 public:
  ModuleReplicas(std::shared_ptr<torch::nn::Module> module, const DataParallelOptions& options);

  torch::nn::Module& module() const { return *module_; }
  const std::vector<c10::Device>& devices() const { return devices_; }
  c10::Device output_device() const { return output_device_; }
  int64_t dim() const { return dim_; }

  /// Creates the copies again. Throws UsageError if the module is not on the first device or cannot be cloned.
  void replicate();
  /// Updates the first `count` - 1 copies, then calls `body` for the module and for these copies as
  /// DeviceThreads::run does.
  void run(size_t count, const std::function<void(size_t, torch::nn::Module&)>& body);

 private:
  using Layers = std::vector<std::shared_ptr<torch::nn::Module>>;

  /// Tensors and layers of a copy, in the order of the module's tensors and layers.
  struct Copy {
    std::vector<at::Tensor> parameters, buffers;
    Layers layers;  // the first is the copy itself
  };
  /// Properties of one of the module's tensors when the copies were created.
  struct Form {
    explicit Form(const at::Tensor& tensor);
    bool operator==(const Form& other) const = default;

    const c10::TensorImpl* tensor;
    const void* memory;
    c10::ScalarType dtype;
    c10::Device device;
    bool trains;
  };

  std::vector<Form> forms() const;
  void refuse_synced_layers() const;
  void check_place() const;
  Copy make_copy(c10::Device device) const;
  void follow(size_t count);

  const std::shared_ptr<torch::nn::Module> module_;
  const std::vector<c10::Device> devices_;
  const c10::Device output_device_;
  const int64_t dim_;
  std::vector<Form> made_of_;
  Layers made_of_layers_;
  std::vector<Copy> copies_;  // for each device except the first
  const OwnedPointer<DeviceThreads> threads_;
};

}  // namespace lockstep::detail
