#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep::detail {

/// Detects a step of an optimizer by the operators that one thread calls. LibTorch passes each operator with its
/// inputs to the watch. A step is an operator that changes memory of a parameter in place. Neither versions nor values
/// of the parameters show a step: LibTorch's SGD writes through data(), which does not change the version, a collective
/// changes the version without a step, and a step may leave all values unchanged. lockstep's fused optimizers report a
/// step on a CPU as one operator whose first input is the list of parameters.
///
/// Not steps: operators inside of lockstep's collectives, copies into parameters, and operators that change a tensor's
/// properties only (requires_grad_, set_).
///
/// A watched operator takes about 2 us longer, so watch a thread only while few operators run. Not thread-safe, but
/// begin() and end() may be called on different threads.
class ParameterWatch {
 public:
  explicit ParameterWatch(std::vector<at::Tensor> parameters);
  ~ParameterWatch();
  ParameterWatch(const ParameterWatch&) = delete;
  ParameterWatch& operator=(const ParameterWatch&) = delete;

  /// Watches the calling thread until end(), or until a step was found. Watches no other thread any more.
  void begin();
  void end();

  /// Whether there was a step while the watch was on, since the last forget().
  bool has_found_step() const;
  void forget();

  /// The parameters that a watched thread looks for.
  struct Target {
    explicit Target(std::shared_ptr<const std::vector<at::Tensor>> tensors) : parameters(std::move(tensors)) {}
    const std::shared_ptr<const std::vector<at::Tensor>> parameters;
    std::atomic<bool> is_watched{true};
    std::atomic<bool> is_found{false};
  };

 private:
  const std::shared_ptr<const std::vector<at::Tensor>> parameters_;
  std::shared_ptr<Target> target_;  // of the last begin(); null before
  bool has_found_ = false;          // an earlier target has found a step
};

}  // namespace lockstep::detail
