#pragma once

#include <vector>

#include <ATen/ATen.h>
#include <torch/version.h>

// Everything that differs between the versions of LibTorch we build with stands here, so that no other file asks.

namespace lockstep {

/// Debian's LibTorch 1.13 for arm64 computes convolutions in MKL-DNN's reference code; its own are 2 to 4 times faster.
/// A choice for the whole process, so it is the program's to make: call this first thing in main.
inline void prefer_fast_convolutions() {
#if defined(__aarch64__) && TORCH_VERSION_MAJOR < 2
  at::globalContext().setUserEnabledMkldnn(false);
#endif
}

namespace detail {

/// Copies each tensor into the one of the same place, on a GPU in few steps.
inline void copy_together(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 2)
  at::_foreach_copy_(to, from, /*non_blocking=*/true);
#else
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i], /*non_blocking=*/true);
#endif
}

}  // namespace detail

}  // namespace lockstep
