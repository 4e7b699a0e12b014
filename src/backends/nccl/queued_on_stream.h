#pragma once

#include <memory>

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAStream.h>

#include <lockstep/backend.h>

#include "backends/nccl/communicator.h"

namespace lockstep::nccl {

/// Identifies the CUDA graph capture that a stream takes part in; 0 outside a capture.
using CaptureId = unsigned long long;
CaptureId capture_of(const c10::cuda::CUDAStream& stream);

/// Marks the work queued on a stream so far. Inside a capture it marks a node of the graph: streams of the same capture
/// can be ordered after it, but the host cannot wait for it.
class Mark {
 public:
  explicit Mark(const c10::cuda::CUDAStream& stream);

  /// Makes the next work on `stream` wait for the mark. Does nothing if it is the same stream. Does nothing across
  /// captures: a graph as a whole is replayed later.
  void order(const c10::cuda::CUDAStream& stream);
  void synchronize();
  bool is_done();

 private:
  const c10::cuda::CUDAStream stream_;
  const CaptureId capture_;
  at::cuda::CUDAEvent event_;
};

/// A queued call of the backend and its communicator.
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
