#pragma once

#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm_hook.h>
#include <lockstep/process_group.h>

#include "comm/dense.h"
#include "parallel/ddp/bucket_update.h"
#include "parallel/ddp/logging_data.h"

namespace lockstep {

inline bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides();
}

/// Whether both tensors are the same view of the same memory, and so have the same values.
inline bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  const bool are_dense = a.layout() == c10::kStrided && b.layout() == c10::kStrided;
  return are_dense && a.data_ptr() == b.data_ptr() && same_layout(a, b) && a.is_conj() == b.is_conj() &&
         a.is_neg() == b.is_neg();
}

/// Copies a gradient. Small gradients are copied with memcpy, because the call overhead of LibTorch's copy exceeds the
/// time of the copy.
inline void write(const at::Tensor& to, const at::Tensor& from) {
  constexpr size_t kSmallBytes = 64 << 10;
  if (to.nbytes() <= kSmallBytes && to.is_cpu() && from.is_cpu() && to.scalar_type() == from.scalar_type() &&
      same_layout(to, from) && to.is_non_overlapping_and_dense() && !detail::is_lazy(to) && !detail::is_lazy(from))
    std::memcpy(to.data_ptr(), from.data_ptr(), to.nbytes());
  else
    to.copy_(from);
}

struct NamedParameter {
  std::string name;
  at::Tensor tensor;
};

/// Gradients that are reduced together, in one buffer of the backend's memory. Not thread-safe.
class Bucket {
 public:
  /// The layout and memory that a BucketUpdate prescribes.
  struct Prescribed {
    detail::BucketUpdate::Layout layout;
    at::Tensor memory;  // bytes, which other buckets use as well
  };

  /// The bucket's memory has a real dtype; a complex element occupies two elements of the bucket. `extra`
  /// elements follow the gradients. `plan` is GradientBucket::plan. `recorder` must outlive the bucket.
  Bucket(const ProcessGroup& group, size_t index, at::ScalarType dtype, const std::vector<NamedParameter>& parameters,
         int64_t extra, int64_t plan, const StepRecorder& recorder,
         const std::optional<Prescribed>& prescribed = std::nullopt);

  /// Returns a tensor in the bucket's memory with the shape and strides of parameter `slot`: complex if the parameter
  /// is, else of the bucket's dtype. It is not an autograd view: optimizers detach gradients in place, and autograd
  /// views refuse that.
  const at::Tensor& gradient(size_t slot) const { return contents_.gradients[slot]; }

  /// The elements after the gradients. An AveragingHook averages them with the gradients. Other comm hooks do not
  /// receive them: they have their own all-reduce.
  const at::Tensor& extra() const { return extra_; }
  /// Whether a tensor of other code uses the bucket's memory, or other code has a handle of the gradient.
  bool is_used_elsewhere(size_t slot) const;
  /// The memory of the gradients and the elements after them.
  const at::Tensor& memory() const { return memory_; }
  /// Moves all contents to new memory. The old memory is left as it is. Precondition: no other bucket uses the memory,
  /// and no copy is pending.
  void move();
  /// Fills the bucket with zeros.
  void clear() { memory_.zero_(); }

  /// Marks all gradients as missing and drops pending copies and the reduction of an interrupted backward.
  void reset();
  /// Adds a gradient, or zeros if `gradient` is undefined. On a GPU, small gradients are held back until the bucket's
  /// reduction starts and are then copied together; a gradient that fills most of the bucket is copied at once. If
  /// other buckets use the memory, all gradients are held back, unless the bucket is open.
  void put(size_t slot, const at::Tensor& gradient);
  /// The same for the elements after the gradients.
  void put_extra(const at::Tensor& values);
  /// Copies all held-back gradients into the bucket's memory.
  void flush_pending_copies();
  bool is_full() const { return missing_ == 0; }
  /// Call it if no other bucket uses the memory until this bucket is reduced. Not for GPUs.
  void open();
  /// Whether put() copies gradients at once.
  bool is_open() const { return is_open_; }

  /// Starts to average the bucket, or calls the hook if one is set. With a hook, the extra elements are averaged only
  /// if `averages_extra` is set. Collective.
  void start(const CommHook& hook, bool averages_extra);
  bool is_under_way() const { return average_ || finish_hook_; }
  /// Blocks until the started reduction is complete.
  void finish();
  /// Averages the bucket without a hook, on the calling thread if the backend can. Collective.
  void reduce();

  const GradientBucket& contents() const { return contents_; }
  /// Times of the last reduction.
  const StepTimes::Bucket& times() const { return times_; }

 private:
  /// Makes all tensors of the bucket views of this memory.
  void use(const at::Tensor& memory, const at::Tensor& extra);
  /// Counts the handles of the bucket itself. Call it when no other code has handles of its tensors.
  void note_users();
  bool exceeds_half_of_bucket(const at::Tensor& place) const;
  void hold_back(const at::Tensor& place, const at::Tensor& gradient);
  void concatenate(const std::vector<at::Tensor>& places, const std::vector<at::Tensor>& values);

  ProcessGroup group_;
  detail::BucketUpdate::Layout layout_;
  at::Tensor memory_;   // the gradients, then the extra elements
  at::Tensor extra_;    // has separate memory if other buckets use memory_
  at::Tensor padding_;  // on a GPU: zeros for the gap between two gradients
  bool is_memory_shared_ = false;
  bool is_open_ = false;
  GradientBucket contents_;
  GradientBucket contents_with_extra_;  // for an AveragingHook; only in the last bucket
  size_t memory_users_ = 0;             // tensors of the bucket itself
  std::vector<size_t> gradient_users_;  // by slot: handles of the bucket itself
  size_t missing_ = 0;
  std::vector<at::Tensor> places_, values_;  // pending copies; an undefined value stands for zeros
  std::optional<Work> average_;              // of the running reduction
  FinishReduction finish_hook_{};            // of the running reduction
  const StepRecorder* recorder_;             // not null
  StepTimes::Bucket times_{};
};

}  // namespace lockstep
