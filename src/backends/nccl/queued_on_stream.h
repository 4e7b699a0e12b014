#pragma once

#include <memory>

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAStream.h>

#include <lockstep/backend.h>

#include "backends/nccl/communicator.h"

namespace lockstep::nccl {

/// Which capture of a CUDA graph a stream is in; none is 0.
using CaptureId = unsigned long long;
CaptureId capture_of(const c10::cuda::CUDAStream& stream);

/// What a stream was given up to now. Inside a capture it means that place of the graph: streams of the same capture
/// can be ordered after it, and nobody can wait for it.
class Mark {
 public:
  explicit Mark(const c10::cuda::CUDAStream& stream);

  /// Orders the stream after it, unless it is the same one, or in another capture, which comes later as a whole.
  void order(const c10::cuda::CUDAStream& stream);
  void synchronize();
  bool is_done();

 private:
  const c10::cuda::CUDAStream stream_;
  const CaptureId capture_;
  at::cuda::CUDAEvent event_;
};

/// A call of the backend, with the communicator that it went to.
class QueuedOnStream final : public QueuedCall {
 public:
  QueuedOnStream(const c10::cuda::CUDAStream& stream, std::shared_ptr<Communicator> communicator);

  Mark& end() { return end_; }
  void order_current_stream() override;
  void synchronize() override { end_.synchronize(); }
  bool is_done() override;

 private:
  Mark end_;
  const std::shared_ptr<Communicator> communicator_;
};

}  // namespace lockstep::nccl
