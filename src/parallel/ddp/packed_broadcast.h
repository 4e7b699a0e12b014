#pragma once

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/process_group.h>

namespace lockstep {

/// Broadcasts the same tensors repeatedly, in one message regardless of their dtypes. The packing buffer is kept
/// between calls; tensors of more than 25 MiB in total are not packed. Not thread-safe.
class PackedBroadcast {
 public:
  PackedBroadcast(ProcessGroup group, std::vector<at::Tensor> tensors)
      : group_(std::move(group)), tensors_(std::move(tensors)) {}

  /// Copies root's values to every rank. Collective.
  void run(int root);

 private:
  bool is_laid_out() const;
  void lay_out();

  const ProcessGroup group_;
  const std::vector<at::Tensor> tensors_;
  std::vector<at::Tensor> seen_;     // the tensors at the last lay_out(): their memory or size may have changed since
  at::Tensor memory_;                // packing buffer; undefined if the tensors are not packed
  std::vector<at::Tensor> outside_;  // the non-empty tensors, viewed as bytes where contiguous
  std::vector<at::Tensor> inside_;   // their places in memory_
};

}  // namespace lockstep
