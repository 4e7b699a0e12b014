#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "checkpoint/entries.h"

namespace lockstep::checkpoint {

/// The part of a storage that a tensor uses. Equal views have equal elements.
using View = std::tuple<const void*, at::ScalarType, int64_t, std::vector<int64_t>, std::vector<int64_t>>;

/// The view of a tensor of a file, which has a storage and strides.
View view_of(const at::Tensor& tensor);

/// Limits the work on the tensors of files, and the bytes that are written for them. Tensors may have far more elements
/// than the file has bytes, through overlapping strides and many tensors on one storage. The sum over all tensors is
/// limited to 64 times the bytes of their storages, and 16 MiB.
class ElementBudget {
 public:
  /// The error begins with `files` and ends with `remedy`.
  ElementBudget(std::string files, const std::vector<NamedTensor>& tensors, std::string remedy);

  /// Subtracts the bytes that are to be read or written for a tensor. Throws CheckpointError, which names the tensor,
  /// if the budget does not suffice.
  void spend(const NamedTensor& named, uint64_t bytes);

 private:
  const std::string files_, remedy_;
  uint64_t stored_ = 0;  // the bytes of the storages
  uint64_t limit_ = 0;
  uint64_t spent_ = 0;
};

}  // namespace lockstep::checkpoint
