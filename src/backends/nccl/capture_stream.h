#pragma once

#include <functional>
#include <memory>

#include <c10/core/Device.h>

namespace lockstep::nccl {

/// A stream of a GPU beside the current one, on which work is tried, and then captured in a CUDA graph, which the
/// current stream repeats. The default stream cannot be captured. Not thread-safe.
class CaptureStream {
 public:
  virtual ~CaptureStream() = default;

  /// Does the work there, after what the current stream was given so far; that one goes on after it.
  virtual void run(const std::function<void()>& work) = 0;
  /// Remembers what the work would do, and does not do it. Throws what the work throws, or the driver's c10::Error.
  virtual void capture(const std::function<void()>& work) = 0;
  /// Does, on the current stream, what was captured.
  virtual void replay() = 0;
};
std::unique_ptr<CaptureStream> make_capture_stream(c10::Device gpu);

}  // namespace lockstep::nccl
