#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "parallel/ddp/bucket.h"

namespace lockstep {

/// Lets backward compute large gradients on a CPU directly in the memory of their buckets, so that they need not be
/// copied. For this it replaces LibTorch's CPU allocator, for the lifetime of the process, by an allocator that
/// forwards every allocation to the previous allocator, except the allocations that will hold a gradient.
///
/// A wrong guess costs time, and memory of the bucket while the tensor exists, but changes no value: see release().
/// Thread-safe.
class InPlaceGradients {
 public:
  class Reservations;

  InPlaceGradients();
  ~InPlaceGradients();
  InPlaceGradients(const InPlaceGradients&) = delete;
  InPlaceGradients& operator=(const InPlaceGradients&) = delete;

  /// Whether the gradient of this place in a bucket is large enough to be computed in place.
  static bool is_for(const at::Tensor& place) { return place.is_cpu() && place.nbytes() >= kMinBytes; }
  static constexpr size_t kMinBytes = 16 << 10;
  /// Replaces the allocator, unless that is done. Call it before other threads allocate, as far as possible.
  static void install();

  /// Where to compute the gradient of a parameter.
  struct Place {
    size_t parameter;
    at::Tensor view;    // of the gradient's memory
    at::Tensor memory;  // contains `view`; lives as long as a tensor that was allocated in it
  };
  /// Call it when backward begins on this thread, with places that no tensor uses.
  void reserve(const std::vector<Place>& places);
  /// Call it when the gradient of a parameter is complete, before its place in the bucket is written to. `gradient` is
  /// .grad(), and `arrived` the gradient that autograd has just accumulated; undefined if there is none. If the tensor
  /// that was allocated in the place is not the gradient, or if other tensors use its memory as well, the bucket leaves
  /// its memory to that tensor and moves to new memory.
  void release(size_t parameter, Bucket& bucket, size_t slot, const at::Tensor& gradient, const at::Tensor& arrived);
  /// No place is reserved until the next reserve().
  void withdraw() const;

  /// Whether a tensor that was allocated in this place exists.
  static bool is_taken(const at::Tensor& view);

 private:
  const std::shared_ptr<Reservations> reservations_;
};

}  // namespace lockstep
