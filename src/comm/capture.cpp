#include "comm/capture.h"

#include <lockstep/error.h>

#include "comm/group/group.h"
#ifdef LOCKSTEP_HAVE_NCCL
#include "backends/nccl/gpu.h"
#endif

namespace lockstep::detail {
namespace {

// Limit of replays queued on the device: enough to keep a GPU busy, but few, because after the loss of a rank the
// queued steps still run for nothing.
constexpr size_t kMaxReplays = 8;

thread_local Recording* current = nullptr;

}  // namespace

std::unique_ptr<CaptureStream> make_capture_stream([[maybe_unused]] c10::Device device) {
#ifdef LOCKSTEP_HAVE_NCCL
  return nccl::make_capture_stream(device);
#else
  throw UsageError(
      "CapturedStep: this build of lockstep has no CUDA support (nccl); run lockstep doctor, which names what is "
      "missing");
#endif
}

void run_captured(const ProcessGroup& group, const std::function<void()>& replay, const CallOptions& options) {
  auto& on_device = group.member().for_device(group.device().type());
  on_device.await_room(kMaxReplays);
  on_device.run({{Operation::kCapturedStep}, [&](Backend&, const CallInfo&) { replay(); }}, options);
}

Recording::Recording() {
  current = this;
}

Recording::~Recording() {
  current = nullptr;
  for (const auto& call : if_abandoned_) call();
}

std::vector<std::function<void()>> Recording::take() {
  if_abandoned_.clear();
  return std::move(before_replay_);
}

bool Recording::is_active() {
  return current != nullptr;
}

void Recording::before_replay(std::function<void()> call) {
  if (current) current->before_replay_.push_back(std::move(call));
}

void Recording::if_abandoned(std::function<void()> call) {
  if (current) current->if_abandoned_.push_back(std::move(call));
}

bool is_capturing([[maybe_unused]] c10::Device device) {
#ifdef LOCKSTEP_HAVE_NCCL
  if (device.is_cuda()) return nccl::is_capturing(device);
#endif
  return false;
}

}  // namespace lockstep::detail
