#pragma once

#include <optional>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <lockstep/export.h>

namespace lockstep {

/// Autocast of one kind of device on one thread: whether it is on, and the dtype.
struct LOCKSTEP_EXPORT AutocastState {
  bool is_enabled = false;
  c10::ScalarType dtype = c10::ScalarType::BFloat16;

  /// Returns the state of the calling thread.
  static AutocastState current(c10::DeviceType device);
};

/// Sets autocast while it exists, on the thread that constructs it. See autocast(). Guards end in the reverse order of
/// their construction. A guard that was moved from does nothing.
class LOCKSTEP_EXPORT Autocast {
 public:
  Autocast(c10::DeviceType device, const AutocastState& state);
  ~Autocast();
  Autocast(Autocast&& other) noexcept;
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  const c10::DeviceType device_;
  std::optional<AutocastState> before_;  // none after a move
};

/// Runs matrix products and convolutions on the device in `dtype` while the returned guard exists, and operations that
/// need it in float32, as torch.autocast does in Python. Parameters and their gradients keep their dtype. Wrap forward
/// and the loss, not backward: { auto guard = lockstep::autocast(world.device(), torch::kBFloat16); loss = ...; }.
///
/// `dtype` is float16 or bfloat16; before LibTorch 2.1, CPUs have bfloat16 only. Throws UsageError for other dtypes and
/// for devices other than CPUs and CUDA. float16 needs a GradScaler. Applies to the calling thread; guards may be
/// nested. With `enabled` = false, switches autocast off, as no_autocast() does: { auto guard = lockstep::autocast(
/// world.device(), torch::kBFloat16, settings.amp); ... }.
[[nodiscard]] LOCKSTEP_EXPORT Autocast autocast(c10::Device device, c10::ScalarType dtype = c10::ScalarType::BFloat16,
                                                bool enabled = true);
/// Switches autocast off while the returned guard exists, for a part of the model that needs full precision.
[[nodiscard]] LOCKSTEP_EXPORT Autocast no_autocast(c10::Device device);

}  // namespace lockstep
