#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// Lets backward compute large gradients on a CPU directly in the memory of buckets, so that they need not be copied
/// there. For this it replaces LibTorch's CPU allocator, for the whole process and for good, by one that passes every
/// allocation on to the allocator that was there before, except those that will hold a gradient.
///
/// Which ones these are is learned: in a backward like the one before, the gradient of a parameter is again the n-th
/// allocation of its size. A wrong guess costs time, and memory of the bucket while the tensor exists, but changes no
/// value: see is_taken(). Thread-safe.
class GradientPlaces {
 public:
  class Offers;

  GradientPlaces();
  ~GradientPlaces();
  GradientPlaces(const GradientPlaces&) = delete;
  GradientPlaces& operator=(const GradientPlaces&) = delete;

  /// Replaces the allocator, unless that is done. Call it before other threads allocate, as far as possible.
  static void install();

  /// Smaller gradients are not worth it.
  static constexpr size_t kLeastBytes = 16 << 10;

  /// Where to compute the gradient of a parameter.
  struct Place {
    size_t parameter;
    at::Tensor view;    // of the gradient's memory
    at::Tensor memory;  // whose memory `view` uses: lives as long as a tensor that was allocated there
  };
  /// Call it when backward begins on this thread, with places that hold nothing.
  void offer(const std::vector<Place>& places);
  /// Call it when the gradient of an offered parameter is complete, before its place is written to.
  void note_arrival(size_t parameter, const at::Tensor& gradient);
  /// Offers nothing until the next offer().
  void withdraw() const;
  /// Never offers a place for this parameter again.
  void exclude(size_t parameter);

  /// Whether a tensor that was allocated in this place exists. If it is not the parameter's gradient, the guess was
  /// wrong, and the place must not be written to.
  static bool is_taken(const at::Tensor& view);

 private:
  const std::shared_ptr<Offers> offers_;
};

}  // namespace lockstep
