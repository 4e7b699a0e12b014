#pragma once

#include <chrono>
#include <cstring>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm_hook.h>
#include <lockstep/process_group.h>

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

/// Gradients that are reduced together, in one piece of the backend's memory. Not thread-safe.
class Bucket {
 public:
  using Clock = std::chrono::steady_clock;

  /// When things happened in the last reduction.
  struct Times {
    Clock::time_point full;
    Clock::time_point started;
    Clock::time_point reduced;
  };

  /// `parameters` of one dtype and device; `extra` more elements follow the gradients.
  Bucket(const ProcessGroup& group, size_t index, const std::vector<at::Tensor>& parameters, int64_t extra);

  /// A tensor of the shape and strides of parameter `slot` in the bucket's memory. Not an autograd view: optimizers
  /// detach gradients in place, which those refuse.
  const at::Tensor& gradient(size_t slot) const { return contents_.gradients[slot]; }

  /// The elements after the gradients. A hook does not get them: they travel beside it.
  const at::Tensor& extra() const { return extra_; }
  /// All of it is zero.
  void clear() { memory_.zero_(); }

  /// All gradients are missing again. Drops what an interrupted backward has left.
  void reset();
  /// Adds a gradient, or zeros when it is undefined. On a GPU small gradients are kept until the bucket's reduction
  /// starts and are then copied together; a gradient that fills most of the bucket is copied at once.
  void put(size_t slot, const at::Tensor& gradient);
  /// The same for the elements after the gradients.
  void put_extra(const at::Tensor& values);
  /// What was put is in the bucket's memory.
  void flush_pending_copies();
  bool is_full() const { return missing_ == 0; }

  /// Averages the bucket, or does what the hook does if there is one. Collective.
  void start(const CommHook& hook);
  bool is_under_way() const { return average_ || finish_hook_; }
  void finish();
  /// Averages it without a hook, on the calling thread where that can be.
  void reduce();

  const GradientBucket& contents() const { return contents_; }
  const Times& times() const { return times_; }

 private:
  bool is_most_of_it(const at::Tensor& place) const;

  ProcessGroup group_;
  at::Tensor memory_;  // the gradients, then the extra elements
  at::Tensor extra_;
  GradientBucket contents_;
  size_t missing_ = 0;
  std::vector<at::Tensor> places_, values_;  // to be copied together, on a GPU
  std::optional<Work> average_;              // of a reduction under way
  FinishReduction finish_hook_{};            // of a reduction under way
  Times times_{};
};

}  // namespace lockstep
