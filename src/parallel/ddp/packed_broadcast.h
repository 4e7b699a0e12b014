#pragma once

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/process_group.h>

namespace lockstep {

/// The same tensors, broadcast again and again, in one message whatever their dtypes. What they take up is kept, unless
/// it is much. Not thread-safe.
class PackedBroadcast {
 public:
  PackedBroadcast(ProcessGroup group, std::vector<at::Tensor> tensors)
      : group_(std::move(group)), tensors_(std::move(tensors)) {}

  /// Every rank has root's values. Collective.
  void run(int root);

 private:
  bool is_laid_out() const;
  void lay_out();

  const ProcessGroup group_;
  const std::vector<at::Tensor> tensors_;
  std::vector<at::Tensor> seen_;     // as they were laid out: a tensor may be given other memory, or another size
  at::Tensor memory_;                // for all of them; undefined where they are not packed
  std::vector<at::Tensor> outside_;  // each that has elements, as bytes where that can be
  std::vector<at::Tensor> inside_;   // and in the memory
};

}  // namespace lockstep
