#pragma once

#include <vector>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <torch/version.h>

// All differences between the supported LibTorch versions are in this file.

namespace lockstep::detail {

/// Copies each tensor into the one of the same place, on a GPU in few steps.
inline void copy_together(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 2)
  at::_foreach_copy_(to, from, /*non_blocking=*/true);
#else
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i], /*non_blocking=*/true);
#endif
}

/// Multiplies all of them by a 0-dimensional tensor of their device, on a GPU in few steps.
inline void multiply_together(const std::vector<at::Tensor>& tensors, const at::Tensor& factor) {
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 1)
  at::_foreach_mul_(tensors, factor);
#else
  for (auto tensor : tensors) tensor.mul_(factor);
#endif
}

#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 5)
inline constexpr bool kMeasuresEvents = true;
#else
inline constexpr bool kMeasuresEvents = false;
#endif

/// Only if kMeasuresEvents. Both events must have finished.
inline double elapsed_ms([[maybe_unused]] const c10::Event& from, [[maybe_unused]] const c10::Event& to) {
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 5)
  return from.elapsedTime(to);
#else
  return 0;
#endif
}

/// Only if kMeasuresEvents. Blocks until the event has finished.
inline void synchronize([[maybe_unused]] const c10::Event& event) {
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 5)
  event.synchronize();
#endif
}

#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 3)
inline constexpr bool kFusesOnGpu = true;
#else
inline constexpr bool kFusesOnGpu = false;
#endif

/// All parameters of one dtype and GPU.
struct FusedLists {
  std::vector<at::Tensor> parameters, gradients, first, second, largest, steps;
};

/// Only where kFusesOnGpu. `first` and `second` are the moments, `largest` is AMSGrad's.
inline void fused_adam([[maybe_unused]] const FusedLists& lists, [[maybe_unused]] const at::Tensor& lr,
                       [[maybe_unused]] double beta1, [[maybe_unused]] double beta2,
                       [[maybe_unused]] double weight_decay, [[maybe_unused]] double eps,
                       [[maybe_unused]] bool is_decoupled) {
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 3)
  const bool amsgrad = !lists.largest.empty();
  const auto& [parameters, gradients, first, second, largest, steps] = lists;
  if (is_decoupled)
    at::_fused_adamw_(parameters, gradients, first, second, largest, steps, lr, beta1, beta2, weight_decay, eps,
                      amsgrad, /*maximize=*/false);
  else
    at::_fused_adam_(parameters, gradients, first, second, largest, steps, lr, beta1, beta2, weight_decay, eps, amsgrad,
                     /*maximize=*/false);
#endif
}

/// Only where kFusesOnGpu. `first` is the momentum, and empty where there is none.
inline void fused_sgd([[maybe_unused]] const FusedLists& lists, [[maybe_unused]] const at::Tensor& lr,
                      [[maybe_unused]] double momentum, [[maybe_unused]] double dampening,
                      [[maybe_unused]] double weight_decay, [[maybe_unused]] bool nesterov,
                      [[maybe_unused]] bool is_first) {
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 3)
  at::_fused_sgd_(lists.parameters, lists.gradients, lists.first, weight_decay, momentum, lr, dampening, nesterov,
                  /*maximize=*/false, is_first);
#endif
}

}  // namespace lockstep::detail
