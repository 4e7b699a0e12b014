#include <lockstep/autocast.h>

#include <utility>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/torch_version.h"

namespace lockstep {
namespace {

void check_autocast(c10::Device device, c10::ScalarType dtype) {
  if (!device.is_cpu() && !device.is_cuda())
    throw UsageError(text("autocast: the device is ", device, ", expected a CPU or a CUDA device"));
  if (dtype == at::kBFloat16 || (dtype == at::kHalf && (device.is_cuda() || detail::kAutocastsHalfOnCpu))) return;
  throw UsageError(text("autocast: the dtype for ", device, " is ", dtype, ", expected BFloat16",
                        device.is_cuda() || detail::kAutocastsHalfOnCpu ? " or Half" : ""));
}

}  // namespace

AutocastState AutocastState::current(c10::DeviceType device) {
  return {detail::is_autocast_enabled(device), detail::autocast_dtype(device)};
}

Autocast::Autocast(c10::DeviceType device, const AutocastState& state)
    : device_(device), before_(AutocastState::current(device)) {
  at::autocast::increment_nesting();
  detail::set_autocast(device, state.is_enabled, state.dtype);
}

Autocast::Autocast(Autocast&& other) noexcept
    : device_(other.device_), before_(std::exchange(other.before_, std::nullopt)) {}

// LibTorch keeps weights that it has converted until the outermost guard ends.
Autocast::~Autocast() {
  if (!before_) return;
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  detail::set_autocast(device_, before_->is_enabled, before_->dtype);
}

Autocast autocast(c10::Device device, c10::ScalarType dtype, bool enabled) {
  if (!enabled) return no_autocast(device);
  check_autocast(device, dtype);
  return Autocast(device.type(), {true, dtype});
}

Autocast no_autocast(c10::Device device) {
  return Autocast(device.type(), {false, AutocastState::current(device.type()).dtype});
}

}  // namespace lockstep
