#pragma once

#include <cstring>

#include <ATen/core/Tensor.h>

namespace lockstep {

inline bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides();
}

/// Whether they are the same elements.
inline bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.data_ptr() == b.data_ptr() && same_layout(a, b);
}

/// Copies a gradient; small ones without LibTorch, whose copy takes longer to call than to do.
inline void write(const at::Tensor& to, const at::Tensor& from) {
  constexpr size_t kSmallBytes = 64 << 10;
  if (to.nbytes() <= kSmallBytes && to.is_cpu() && from.is_cpu() && to.scalar_type() == from.scalar_type() &&
      same_layout(to, from) && to.is_non_overlapping_and_dense())
    std::memcpy(to.data_ptr(), from.data_ptr(), to.nbytes());
  else
    to.copy_(from);
}

}  // namespace lockstep
