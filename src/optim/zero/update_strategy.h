#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep::detail {

/// How averaged gradients reach the inner optimizer, and updated parameters all ranks. Implemented by UpdateInStep,
/// ShardedGradients, UpdateInBackward and UpdateOfSharedParameters. Not thread-safe.
class UpdateStrategy {
 public:
  virtual ~UpdateStrategy() = default;

  /// Prepares a step. Accepts the values that the program has written to the parameters. Throws UsageError if no step
  /// can be made now. Collective.
  virtual void begin_step() = 0;
  /// Updates the parameters, or ends a step that backward has made. Makes no step if `skip` is defined and not zero.
  /// Collective.
  virtual void step(const at::Tensor& skip) = 0;

  /// This rank's share of the gradients, if the parameters have none between backward and step().
  virtual std::optional<std::vector<at::Tensor>> sharded_gradients() const { return std::nullopt; }
};

}  // namespace lockstep::detail
