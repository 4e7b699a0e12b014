#pragma once

#include <vector>

#include "optim/zero/element_update.h"
#include "optim/zero/sharded_memory.h"

namespace lockstep::detail {

/// The optimizer's state for a ShardedMemory with a shared buffer, in shared memory too, so that it outlives a rank's
/// process. Each rank uses its share. May keep a copy of the parameters and the state before the last step.
class SharedState {
 public:
  /// `states` is the number of tensors in the state of a parameter. `memory` must outlive this object. Collective.
  SharedState(const ProcessGroup& group, const ShardedMemory& memory, size_t states);

  /// From the next step on, keeps the copies that restore() needs. Collective.
  void keep_copies(const ProcessGroup& group);

  /// Where the state of a piece of this rank lies.
  ElementUpdate::Memory of(const ShardPiece& piece) const;

  /// Restores the elements that the given step has changed in the parameters and the state, in the shares of all ranks.
  /// Requires keep_copies(). A rank that is still in this step must call it as well. Several ranks may call it at once.
  void restore(int32_t step) const;

 private:
  const ShardedMemory& memory_;
  const int rank_;
  std::vector<at::Tensor> states_;
  std::vector<at::Tensor> before_;                // the parameters, then states_; empty without keep_copies()
  at::Tensor saved_;                              // the last step in which each part was copied to before_
  std::vector<std::vector<ShardPiece>> pieces_;   // by rank
  std::vector<std::vector<int64_t>> first_part_;  // by rank and piece: index into saved_
};

}  // namespace lockstep::detail
