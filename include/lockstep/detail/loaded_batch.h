#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <lockstep/export.h>
#include <lockstep/tensors_in.h>

namespace lockstep {

struct DataLoaderOptions;

namespace detail {

/// Returns whether batches are copied to pinned memory.
LOCKSTEP_EXPORT bool pins_memory(const DataLoaderOptions& options);

/// Copies tensors to the device of a loader. A copy to a GPU can be started ahead of the loop; it then runs on a stream
/// that is used for such copies only, at the same time as the work of the loop. Thread-safe.
class LOCKSTEP_EXPORT DeviceCopies {
 public:
  using Tensors = std::vector<at::Tensor*>;
  /// A copy that was started. Empty if none was.
  using Started = std::shared_ptr<void>;

  /// A GPU without an index is the current one. Copies nothing without a device.
  explicit DeviceCopies(std::optional<c10::Device> device);

  /// Replaces the tensors by copies on the GPU, which must not be used before finish(). Does nothing without a GPU.
  Started start(const Tensors& tensors) const;
  /// Lets the current stream wait for the copies. Makes the copies itself if they were not started.
  void finish(const Tensors& tensors, const Started& started) const;

 private:
  std::optional<c10::Device> device_;
};

/// A batch of a loader, and its copy to the loader's device.
template <class Batch>
struct LoadedBatch {
  /// Call it on the thread that makes the batch.
  void pin(const DataLoaderOptions& options) {
    if (!pins_memory(options)) return;
    TensorsIn<Batch>::visit(batch, [](at::Tensor& tensor) {
      if (tensor.device().is_cpu()) tensor = tensor.pin_memory();
    });
  }
  void start_copy(const DeviceCopies& copies) { started = copies.start(tensors()); }
  /// Call it on the thread of the loop.
  void finish_copy(const DeviceCopies& copies) { copies.finish(tensors(), started); }

  DeviceCopies::Tensors tensors() {
    DeviceCopies::Tensors found;
    TensorsIn<Batch>::visit(batch, [&](at::Tensor& tensor) { found.push_back(&tensor); });
    return found;
  }

  Batch batch;
  DeviceCopies::Started started{};
};

}  // namespace detail

}  // namespace lockstep
