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

using nccl::CaptureStream;
/// UsageError in a build without CUDA.
std::unique_ptr<CaptureStream> make_capture_stream(c10::Device device);

/// Makes `replay`, in which collectives of the group are repeated that were captured, a call of the group: it has its
/// place in the order, its time-out, and fails when a rank is lost. Collective.
void run_captured(const ProcessGroup& group, const std::function<void()>& replay, const CallOptions& options);

/// A step that this thread is capturing, from construction to destruction. Objects that take part in it register what
/// they have to do before each replay, and what to undo when the capture fails.
class Recording {
 public:
  Recording();
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  /// The calls before each replay, in order. The capture has succeeded: nothing is undone.
  std::vector<std::function<void()>> take();

  /// Whether the calling thread is making one.
  static bool is_active();
  /// Adds a call to the calling thread's recording; does nothing without one.
  static void before_replay(std::function<void()> call);
  /// Adds a call that the destructor makes unless the capture succeeded. It must not throw.
  static void if_abandoned(std::function<void()> call);

 private:
  std::vector<std::function<void()>> before_replay_;
  std::vector<std::function<void()>> if_abandoned_;
};

}  // namespace lockstep::detail
