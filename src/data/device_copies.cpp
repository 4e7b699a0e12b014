#include <lockstep/data_loader.h>

#include <map>
#include <mutex>

#include <ATen/Context.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace lockstep::detail {
namespace {

/// Returns the GPU's stream for copies, the same stream in each call. A stream for each loader would exhaust LibTorch's
/// 32 streams; then a loader would share a stream with other work, for example a step that is being captured.
c10::Stream copy_stream(c10::Device gpu) {
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, c10::Stream> streams;
  const std::lock_guard lock(mutex);
  const auto found = streams.find(gpu.index());
  if (found != streams.end()) return found->second;
  return streams.emplace(gpu.index(), c10::impl::VirtualGuardImpl(gpu.type()).getStreamFromGlobalPool(gpu))
      .first->second;
}

void copy_to(c10::Device device, const DeviceCopies::Tensors& tensors) {
  for (auto* tensor : tensors) *tensor = tensor->to(device, /*non_blocking=*/device.is_cuda());
}

}  // namespace

DeviceCopies::DeviceCopies(std::optional<c10::Device> device) : device_(device) {
  if (device_ && device_->is_cuda() && !device_->has_index() && at::hasCUDA())
    device_ = c10::impl::VirtualGuardImpl(device_->type()).getDevice();  // of this thread, not of a worker
}

DeviceCopies::Started DeviceCopies::start(const Tensors& tensors) const {
  if (!device_ || !device_->is_cuda()) return nullptr;
  const auto stream = copy_stream(*device_);
  auto copied = std::make_shared<c10::Event>(device_->type());
  const c10::StreamGuard guard(stream);
  copy_to(*device_, tensors);
  copied->record(stream);
  return copied;
}

void DeviceCopies::finish(const Tensors& tensors, const Started& started) const {
  if (!device_) return;
  if (!started) return copy_to(*device_, tensors);
  const auto current = c10::impl::VirtualGuardImpl(device_->type()).getStream(*device_);
  std::static_pointer_cast<c10::Event>(started)->block(current);
  for (auto* tensor : tensors) tensor->record_stream(current);  // the copy's memory belongs to the stream for copies
}

}  // namespace lockstep::detail
