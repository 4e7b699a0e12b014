#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace lockstep {

struct Slice {
  int64_t begin = 0;
  int64_t size = 0;
};

/// Returns slice `index` of `count` elements cut into `parts` slices whose sizes differ by at most one.
inline Slice slice_of(int64_t count, int parts, int index) {
  int64_t base = count / parts;
  int64_t longer = count % parts;
  int64_t begin = base * index + (index < longer ? index : longer);
  return {begin, base + (index < longer ? 1 : 0)};
}

inline char* bytes_of(const at::Tensor& tensor) {
  return static_cast<char*>(tensor.data_ptr());
}

}  // namespace lockstep
