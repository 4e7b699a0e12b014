#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <c10/core/Device.h>

#include <lockstep/call_options.h>
#include <lockstep/process_group.h>

#include "backends/nccl/capture_stream.h"

namespace lockstep::detail {

/// Whether the calling thread's current stream on that device is being captured into a CUDA graph.
bool is_capturing(c10::Device device);

using nccl::CapturedGraph;
using nccl::CaptureStream;
/// Throws UsageError in a build without CUDA.
std::unique_ptr<CaptureStream> make_capture_stream(c10::Device device);

/// Runs `replay`, which replays captured collectives of the group, as one call of the group: in the order of calls,
/// with a time-out, and failing when a rank is lost. Collective.
void run_captured(const ProcessGroup& group, const std::function<void()>& replay, const CallOptions& options);

/// The capture of a training step by this thread, from construction to destruction. Objects that take part register
/// work to do before each replay, and cleanup for a failed capture.
class Recording {
 public:
  Recording();
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  /// Call it when the capture has succeeded. Returns the calls to make before each replay, in order. Drops the cleanup.
  std::vector<std::function<void()>> take();

  /// Whether the calling thread has a recording.
  static bool is_active();
  /// Adds a call to the calling thread's recording; does nothing without one.
  static void before_replay(std::function<void()> call);
  /// Adds a cleanup call, which the destructor makes unless take() was called. It must not throw.
  static void if_abandoned(std::function<void()> call);

 private:
  std::vector<std::function<void()>> before_replay_;
  std::vector<std::function<void()>> if_abandoned_;
};

}  // namespace lockstep::detail
