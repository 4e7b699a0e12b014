#pragma once

#include <functional>
#include <memory>

#include <c10/core/Device.h>

namespace lockstep::nccl {

/// Captured work. Not thread-safe.
class CapturedGraph {
 public:
  virtual ~CapturedGraph() = default;

  /// Runs the captured work on the current stream.
  virtual void replay() = 0;
};

/// A side stream of a GPU for warming up work and capturing it into CUDA graphs, which the current stream then replays.
/// A side stream is needed because the default stream cannot be captured. Not thread-safe.
class CaptureStream {
 public:
  virtual ~CaptureStream() = default;

  /// Runs the work on the side stream, after the work queued on the current stream so far. Later work of the current
  /// stream waits for it.
  virtual void run(const std::function<void()>& work) = 0;
  /// Captures the work without executing it. Rethrows exceptions of the work; throws c10::Error when the capture fails.
  /// The graphs of one CaptureStream share their temporary memory, so they must not run at the same time.
  virtual std::unique_ptr<CapturedGraph> capture(const std::function<void()>& work) = 0;
};
std::unique_ptr<CaptureStream> make_capture_stream(c10::Device gpu);

}  // namespace lockstep::nccl
