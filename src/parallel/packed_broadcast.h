#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/process_group.h>

namespace lockstep {

/// The same tensors, broadcast again and again, in one message whatever their dtypes. What they take up is kept, unless
/// it is much. Not thread-safe.
class PackedBroadcast {
 public:
  PackedBroadcast(ProcessGroup group, std::vector<at::Tensor> tensors);

  /// Every rank has root's values. Collective.
  void run(int root);

 private:
  void lay_out();
  bool is_laid_out() const;

  const ProcessGroup group_;
  std::vector<at::Tensor> tensors_;  // constant after construction
  int64_t bytes_ = 0;                // of all of them, one after the other
  at::Tensor memory_;                // for all of them; undefined until the first run
  std::vector<at::Tensor> outside_;  // each as it is, as bytes where that can be
  std::vector<at::Tensor> inside_;   // and in the memory
};

}  // namespace lockstep
