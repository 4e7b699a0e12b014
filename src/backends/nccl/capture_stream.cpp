#include "backends/nccl/capture_stream.h"

#include <utility>

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

/// Memory from which captured work allocates. Lives as long as a graph that uses it.
struct Pool {
  const at::cuda::MempoolId_t id = at::cuda::graph_pool_handle();
};

class Graph final : public CapturedGraph {
 public:
  explicit Graph(std::shared_ptr<const Pool> pool) : pool_(std::move(pool)) {}

  at::cuda::CUDAGraph& graph() { return graph_; }
  void replay() override { graph_.replay(); }

 private:
  const std::shared_ptr<const Pool> pool_;
  at::cuda::CUDAGraph graph_;
};

class SideStream final : public CaptureStream {
 public:
  explicit SideStream(c10::Device gpu) : stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, gpu.index())) {}

  void run(const std::function<void()>& work) override {
    const auto current = c10::cuda::getCurrentCUDAStream(stream_.device_index());
    order(current, stream_);
    const OrderAtEnd order_at_end(stream_, current);
    c10::cuda::CUDAStreamGuard guard(stream_);
    work();
  }

  std::unique_ptr<CapturedGraph> capture(const std::function<void()>& work) override {
    order(c10::cuda::getCurrentCUDAStream(stream_.device_index()), stream_);
    c10::cuda::CUDAStreamGuard guard(stream_);
    auto pool = pool_.lock();
    if (!pool) pool_ = pool = std::make_shared<const Pool>();
    auto captured = std::make_unique<Graph>(pool);
    begin_capture(captured->graph(), pool->id);
    try {
      work();
      captured->graph().capture_end();
    } catch (...) {
      give_up(std::move(captured), pool->id);
      throw;
    }
    return captured;
  }

 private:
  /// LibTorch does not clean up after an invalidated capture: its allocator keeps allocating from the pool of the
  /// graph, and its random number generator stays in capture mode. A capture that succeeds resets both.
  void give_up(std::unique_ptr<Graph> captured, const at::cuda::MempoolId_t& pool) {
    auto try_to = [](auto&& call) {
      try {
        call();
      } catch (const c10::Error&) {  // already done
      }
    };
    try_to([&] { captured->graph().capture_end(); });
    try_to([&] { end_pool(c10::cuda::CUDACachingAllocator::get(), stream_.device_index(), pool); });
    captured.reset();
    try_to([&] {
      at::cuda::CUDAGraph empty;
      begin_capture(empty, at::cuda::graph_pool_handle());
      const auto tensor = at::zeros({1}, at::TensorOptions(stream_.device()));
      empty.capture_end();
    });
  }

  const c10::cuda::CUDAStream stream_;
  std::weak_ptr<const Pool> pool_;  // of the graphs that exist
};

}  // namespace

std::unique_ptr<CaptureStream> make_capture_stream(c10::Device gpu) {
  return std::make_unique<SideStream>(gpu);
}

}  // namespace lockstep::nccl
