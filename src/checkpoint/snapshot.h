#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/value.h>

namespace lockstep::detail {

/// Copies values into CPU memory that is kept for the next copy, so that later copies are as fast as memory is. Memory
/// of GPUs is copied through pinned memory. Not thread-safe.
class Snapshot {
 public:
  /// Returns a value with the same contents in the snapshot's memory. It is valid until the next call.
  Value take(const Value& value);

 private:
  std::vector<at::Tensor> buffers_;  // of bytes
};

}  // namespace lockstep::detail
