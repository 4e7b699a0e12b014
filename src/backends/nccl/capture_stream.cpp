#include "backends/nccl/capture_stream.h"

#include <optional>

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace lockstep::nccl {
namespace {

/// Makes the next work on `later` wait for all work queued on `earlier` so far.
void order(const c10::cuda::CUDAStream& earlier, const c10::cuda::CUDAStream& later) {
  at::cuda::CUDAEvent event;
  event.record(earlier);
  event.block(later);
}

/// Thread-local mode: GPU calls of other threads, for example data loading, must not invalidate the capture. LibTorch
/// offers the mode since 2.1.
template <class Graph>
void begin_capture(Graph& graph, const at::cuda::MempoolId_t& pool) {
  if constexpr (requires { graph.capture_begin(pool, cudaStreamCaptureModeThreadLocal); })
    graph.capture_begin(pool, cudaStreamCaptureModeThreadLocal);
  else
    graph.capture_begin(pool);
}

/// Makes one stream wait for another on destruction, also when an exception is thrown.
class OrderAtEnd {
 public:
  OrderAtEnd(const c10::cuda::CUDAStream& earlier, const c10::cuda::CUDAStream& later)
      : earlier_(earlier), later_(later) {}
  ~OrderAtEnd() {
    try {
      order(earlier_, later_);
    } catch (const c10::Error&) {  // the GPU failed; the next CUDA call reports it
    }
  }
  OrderAtEnd(const OrderAtEnd&) = delete;
  OrderAtEnd& operator=(const OrderAtEnd&) = delete;

 private:
  const c10::cuda::CUDAStream& earlier_;
  const c10::cuda::CUDAStream& later_;
};

/// LibTorch has these functions since 2.2.
template <class Allocator>
void end_pool(Allocator* allocator, c10::DeviceIndex gpu, const at::cuda::MempoolId_t& pool) {
  if constexpr (requires { allocator->endAllocateToPool(gpu, pool); }) {
    allocator->endAllocateToPool(gpu, pool);
    allocator->releasePool(gpu, pool);
  }
}

class OneGraph final : public CaptureStream {
 public:
  explicit OneGraph(c10::Device gpu) : stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, gpu.index())) {}

  void run(const std::function<void()>& work) override {
    const auto current = c10::cuda::getCurrentCUDAStream(stream_.device_index());
    order(current, stream_);
    const OrderAtEnd order_at_end(stream_, current);
    c10::cuda::CUDAStreamGuard guard(stream_);
    work();
  }

  void capture(const std::function<void()>& work) override {
    order(c10::cuda::getCurrentCUDAStream(stream_.device_index()), stream_);
    c10::cuda::CUDAStreamGuard guard(stream_);
    const auto pool = at::cuda::graph_pool_handle();
    graph_.emplace();
    begin_capture(*graph_, pool);
    try {
      work();
      graph_->capture_end();
    } catch (...) {
      give_up(pool);
      throw;
    }
  }

  void replay() override { graph_->replay(); }

 private:
  /// LibTorch does not clean up after an invalidated capture: its allocator keeps allocating from the pool of the
  /// graph, and its random number generator stays in capture mode. A capture that succeeds resets both.
  void give_up(const at::cuda::MempoolId_t& pool) {
    auto try_to = [](auto&& call) {
      try {
        call();
      } catch (const c10::Error&) {  // already done
      }
    };
    try_to([&] { graph_->capture_end(); });
    try_to([&] { end_pool(c10::cuda::CUDACachingAllocator::get(), stream_.device_index(), pool); });
    graph_.reset();
    try_to([&] {
      at::cuda::CUDAGraph nothing;
      begin_capture(nothing, at::cuda::graph_pool_handle());
      const auto something = at::zeros({1}, at::TensorOptions(stream_.device()));
      nothing.capture_end();
    });
  }

  const c10::cuda::CUDAStream stream_;
  std::optional<at::cuda::CUDAGraph> graph_;
};

}  // namespace

std::unique_ptr<CaptureStream> make_capture_stream(c10::Device gpu) {
  return std::make_unique<OneGraph>(gpu);
}

}  // namespace lockstep::nccl
