#include "backends/nccl/queued_on_stream.h"

#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep::nccl {
namespace {

/// During its lifetime this thread may query events even while another thread captures a graph.
class RelaxedCapture {
 public:
  RelaxedCapture() { C10_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCapture() { C10_CUDA_IGNORE_ERROR(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace

CaptureId capture_of(const c10::cuda::CUDAStream& stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  CaptureId id = 0;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream.stream(), &status, &id));
  return status == cudaStreamCaptureStatusNone ? 0 : id;
}

Mark::Mark(const c10::cuda::CUDAStream& stream) : stream_(stream), capture_(capture_of(stream)) {
  event_.record(stream_);
}

void Mark::order(const c10::cuda::CUDAStream& stream) {
  if (stream != stream_ && capture_of(stream) == capture_) event_.block(stream);
}

void Mark::synchronize() {
  if (capture_) throw UsageError("the host cannot wait for a call inside the capture of a CUDA graph");
  event_.synchronize();
}

bool Mark::is_done() {
  if (capture_) return true;
  const RelaxedCapture relaxed;
  return event_.query();
}

QueuedOnStream::QueuedOnStream(const c10::cuda::CUDAStream& stream, std::shared_ptr<Communicator> communicator)
    : end_(stream), communicator_(std::move(communicator)) {}

void QueuedOnStream::order_current_stream() {
  end_.order(c10::cuda::getCurrentCUDAStream());
}

bool QueuedOnStream::is_done() {
  try {
    if (end_.is_done()) return true;
  } catch (const c10::Error& error) {
    throw PeerError(text("the GPU failed: ", error.what_without_backtrace()));
  }
  communicator_->check_health();
  return false;
}

}  // namespace lockstep::nccl
