#include "compiled/loaded_graph.h"

#include <exception>
#include <mutex>
#include <utility>

#include <ATen/Context.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep::detail {
namespace {

using torch::inductor::AOTIModelPackageLoader;

std::string matmul_precision() {
  switch (at::globalContext().float32MatmulPrecision()) {
    case at::Float32MatmulPrecision::HIGHEST:
      return "highest";
    case at::Float32MatmulPrecision::HIGH:
      return "high";
    default:
      return "medium";
  }
}

/// Sets the precision of products of float32 matrices, for all threads of the process, while it exists.
class MatmulPrecision {
 public:
  explicit MatmulPrecision(const std::string& wanted) : before_(matmul_precision()), differs_(wanted != before_) {
    if (differs_) at::globalContext().setFloat32MatmulPrecision(wanted);
  }
  ~MatmulPrecision() {
    if (differs_) at::globalContext().setFloat32MatmulPrecision(before_);
  }
  MatmulPrecision(const MatmulPrecision&) = delete;
  MatmulPrecision& operator=(const MatmulPrecision&) = delete;

 private:
  const std::string before_;
  const bool differs_;
};

// Single-threaded: other graphs wait for the GPU after each call, which a captured step must not do. Graphs are loaded
// one after the other: LibTorch's function that reads their metadata is not thread-safe.
AOTIModelPackageLoader load(const std::string& path, const std::string& name, c10::Device device) {
  constexpr bool kRunSingleThreaded = true;
  constexpr size_t kRunners = 1;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  try {
    const auto index = device.is_cpu() ? c10::DeviceIndex(-1) : device.index();
    return AOTIModelPackageLoader(path, name, kRunSingleThreaded, kRunners, index);
  } catch (const std::exception& error) {
    throw CheckpointError(text(path, ": graph '", name, "' cannot be loaded: ", error.what()));
  }
}

}  // namespace

LoadedGraph::LoadedGraph(const std::string& path, const std::string& name, c10::Device device,
                         std::string matmul_precision)
    : device_(device), matmul_precision_(std::move(matmul_precision)), loader_(load(path, name, device)) {}

std::vector<at::Tensor> LoadedGraph::run(std::vector<at::Tensor> arguments) {
  const c10::DeviceGuard device(device_);
  const c10::NoGradGuard no_grad;
  const MatmulPrecision precision(matmul_precision_);
  return loader_.boxed_run(std::move(arguments));
}

}  // namespace lockstep::detail
