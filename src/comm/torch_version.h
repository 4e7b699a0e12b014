#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/Event.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/version.h>

// All differences between the supported LibTorch versions are in this file: no other source has an #if on the version.
// Code outside calls the functions below, or tests the constants with `if constexpr`. The versions that lockstep is
// tested with are in tested_torch_versions.txt.

#define LOCKSTEP_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace lockstep::detail {

/// The pointer that holds a node of autograd's graph. Node is torch::autograd::Node or a class derived from it.
#if LOCKSTEP_TORCH_AT_LEAST(2, 13)
template <class Node>
using NodePointer = c10::intrusive_ptr<Node>;
#else
template <class Node>
using NodePointer = std::shared_ptr<Node>;
#endif

template <class Node, class... Arguments>
NodePointer<Node> make_node(Arguments&&... arguments) {
#if LOCKSTEP_TORCH_AT_LEAST(2, 13)
  return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
#else
  return std::make_shared<Node>(std::forward<Arguments>(arguments)...);
#endif
}

/// The dtypes of this LibTorch that 1.13 does not have.
inline std::vector<at::ScalarType> dtypes_since_1_13() {
#if LOCKSTEP_TORCH_AT_LEAST(2, 3)
  return {at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kUInt16, at::kUInt32, at::kUInt64};
#else
  return {};
#endif
}

/// Whether convolutions on CPUs are faster without MKL-DNN: Debian's LibTorch 1.13 for arm64.
#if defined(__aarch64__) && !LOCKSTEP_TORCH_AT_LEAST(2, 0)
inline constexpr bool kMkldnnSlowsConvolutions = true;
#else
inline constexpr bool kMkldnnSlowsConvolutions = false;
#endif

/// Copies from[i] into to[i] for every i, on a GPU with few kernels.
inline void copy_together(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
#if LOCKSTEP_TORCH_AT_LEAST(2, 2)
  at::_foreach_copy_(to, from, /*non_blocking=*/true);
#else
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i], /*non_blocking=*/true);
#endif
}

/// Multiplies all tensors by a 0-dimensional tensor of their device, on a GPU with few kernels.
inline void multiply_together(const std::vector<at::Tensor>& tensors, const at::Tensor& factor) {
#if LOCKSTEP_TORCH_AT_LEAST(2, 1)
  at::_foreach_mul_(tensors, factor);
#else
  for (auto tensor : tensors) tensor.mul_(factor);
#endif
}

/// Moves averages[i] towards values[i], which has the same dtype, by this fraction of their distance, on a GPU with few
/// kernels. Equal values stay exactly equal.
inline void lerp_together(const std::vector<at::Tensor>& averages, const std::vector<at::Tensor>& values,
                          double fraction) {
#if LOCKSTEP_TORCH_AT_LEAST(2, 1)
  at::_foreach_lerp_(averages, values, fraction);
#else
  for (size_t i = 0; i < averages.size(); ++i) {
    const bool is_narrow = averages[i].element_size() < 4;  // 1.13 has no lerp_ for these on a CPU
    is_narrow ? averages[i].add_(values[i] - averages[i], fraction) : averages[i].lerp_(values[i], fraction);
  }
#endif
}

/// Limits the elements of all tensors to [-limit, limit], on a GPU with few kernels. NaN stays NaN.
inline void clamp_together(const std::vector<at::Tensor>& tensors, double limit) {
#if LOCKSTEP_TORCH_AT_LEAST(2, 1)
  at::_foreach_clamp_min_(tensors, -limit);
  at::_foreach_clamp_max_(tensors, limit);
#else
  for (auto tensor : tensors) tensor.clamp_(-limit, limit);
#endif
}

/// Whether an optimizer replaces options of a parameter group that have the default of their class by its own options.
#if LOCKSTEP_TORCH_AT_LEAST(2, 10)
inline constexpr bool kReplacesDefaultsOfGroups = true;
#else
inline constexpr bool kReplacesDefaultsOfGroups = false;
#endif

#if LOCKSTEP_TORCH_AT_LEAST(2, 5)
inline constexpr bool kMeasuresEvents = true;
#else
inline constexpr bool kMeasuresEvents = false;
#endif

/// Only if kMeasuresEvents. Both events must have finished.
inline double elapsed_ms([[maybe_unused]] const c10::Event& from, [[maybe_unused]] const c10::Event& to) {
#if LOCKSTEP_TORCH_AT_LEAST(2, 5)
  return from.elapsedTime(to);
#else
  return 0;
#endif
}

/// Only if kMeasuresEvents. Blocks until the event has finished.
inline void synchronize([[maybe_unused]] const c10::Event& event) {
#if LOCKSTEP_TORCH_AT_LEAST(2, 5)
  event.synchronize();
#endif
}

#if LOCKSTEP_TORCH_AT_LEAST(2, 3)
inline constexpr bool kFusesOnGpu = true;
#else
inline constexpr bool kFusesOnGpu = false;
#endif

#if LOCKSTEP_TORCH_AT_LEAST(2, 1)
inline constexpr bool kAutocastsHalfOnCpu = true;
#else
inline constexpr bool kAutocastsHalfOnCpu = false;
#endif

// Autocast of CPUs and CUDA devices, on the calling thread.
#if LOCKSTEP_TORCH_AT_LEAST(2, 4)
inline bool is_autocast_enabled(c10::DeviceType device) {
  return at::autocast::is_autocast_enabled(device);
}
inline at::ScalarType autocast_dtype(c10::DeviceType device) {
  return at::autocast::get_autocast_dtype(device);
}
inline void set_autocast(c10::DeviceType device, bool enabled, at::ScalarType dtype) {
  at::autocast::set_autocast_enabled(device, enabled);
  at::autocast::set_autocast_dtype(device, dtype);
}
#else
inline bool is_autocast_enabled(c10::DeviceType device) {
  return device == c10::kCPU ? at::autocast::is_cpu_enabled() : at::autocast::is_enabled();
}
inline at::ScalarType autocast_dtype(c10::DeviceType device) {
  return device == c10::kCPU ? at::autocast::get_autocast_cpu_dtype() : at::autocast::get_autocast_gpu_dtype();
}
inline void set_autocast(c10::DeviceType device, bool enabled, at::ScalarType dtype) {
  if (device == c10::kCPU) {
    at::autocast::set_cpu_enabled(enabled);
    at::autocast::set_autocast_cpu_dtype(dtype);
  } else {
    at::autocast::set_enabled(enabled);
    at::autocast::set_autocast_gpu_dtype(dtype);
  }
}
#endif

/// All parameters of one dtype and GPU.
struct FusedLists {
  std::vector<at::Tensor> parameters, gradients, first, second, largest, steps;
};

/// Only where kFusesOnGpu. `first` and `second` are the moments, `largest` is AMSGrad's. Does nothing if `skip` is
/// defined and not zero.
inline void fused_adam([[maybe_unused]] const FusedLists& lists, [[maybe_unused]] const at::Tensor& lr,
                       [[maybe_unused]] double beta1, [[maybe_unused]] double beta2,
                       [[maybe_unused]] double weight_decay, [[maybe_unused]] double eps,
                       [[maybe_unused]] bool is_decoupled, [[maybe_unused]] const at::Tensor& skip) {
#if LOCKSTEP_TORCH_AT_LEAST(2, 3)
  const bool amsgrad = !lists.largest.empty();
  const auto& [parameters, gradients, first, second, largest, steps] = lists;
  const auto found_inf = skip.defined() ? std::optional(skip) : std::nullopt;
  if (is_decoupled)
    at::_fused_adamw_(parameters, gradients, first, second, largest, steps, lr, beta1, beta2, weight_decay, eps,
                      amsgrad, /*maximize=*/false, /*grad_scale=*/{}, found_inf);
  else
    at::_fused_adam_(parameters, gradients, first, second, largest, steps, lr, beta1, beta2, weight_decay, eps, amsgrad,
                     /*maximize=*/false, /*grad_scale=*/{}, found_inf);
#endif
}

/// Only where kFusesOnGpu. `first` is the momentum, and empty where there is none.
inline void fused_sgd([[maybe_unused]] const FusedLists& lists, [[maybe_unused]] const at::Tensor& lr,
                      [[maybe_unused]] double momentum, [[maybe_unused]] double dampening,
                      [[maybe_unused]] double weight_decay, [[maybe_unused]] bool nesterov,
                      [[maybe_unused]] bool is_first, [[maybe_unused]] const at::Tensor& skip) {
#if LOCKSTEP_TORCH_AT_LEAST(2, 3)
  at::_fused_sgd_(lists.parameters, lists.gradients, lists.first, weight_decay, momentum, lr, dampening, nesterov,
                  /*maximize=*/false, is_first, /*grad_scale=*/{}, skip.defined() ? std::optional(skip) : std::nullopt);
#endif
}

}  // namespace lockstep::detail
