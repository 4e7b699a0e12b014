#include "comm/nccl/graph.h"

#include <optional>

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace lockstep::nccl {
namespace {

/// Orders `later` after what `earlier` was given up to now.
void order(const c10::cuda::CUDAStream& earlier, const c10::cuda::CUDAStream& later) {
  at::cuda::CUDAEvent event;
  event.record(earlier);
  event.block(later);
}

/// What other threads do to the GPU meanwhile, as loading data, is none of the capture's business. LibTorch has this
/// choice since 2.1.
template <class Graph>
void begin(Graph& graph) {
  if constexpr (requires { graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal); })
    graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
  else
    graph.capture_begin();
}

class OneGraph final : public detail::CaptureStream {
 public:
  explicit OneGraph(c10::Device gpu) : stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, gpu.index())) {}

  void run(const std::function<void()>& work) override {
    const auto current = c10::cuda::getCurrentCUDAStream(stream_.device_index());
    order(current, stream_);
    {
      c10::cuda::CUDAStreamGuard guard(stream_);
      work();
    }
    order(stream_, current);
  }

  void capture(const std::function<void()>& work) override {
    order(c10::cuda::getCurrentCUDAStream(stream_.device_index()), stream_);
    c10::cuda::CUDAStreamGuard guard(stream_);
    graph_.emplace();
    begin(*graph_);
    try {
      work();
    } catch (...) {
      try {
        graph_->capture_end();  // which may find that the capture is void: the allocator hears of it in any case
      } catch (const c10::Error&) {
      }
      graph_.reset();
      throw;
    }
    graph_->capture_end();
  }

  void replay() override { graph_->replay(); }

 private:
  const c10::cuda::CUDAStream stream_;
  std::optional<at::cuda::CUDAGraph> graph_;
};

}  // namespace

std::unique_ptr<detail::CaptureStream> make_capture_stream(c10::Device gpu) {
  return std::make_unique<OneGraph>(gpu);
}

}  // namespace lockstep::nccl
