#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/process_group.h>
#include "optim/shard_plan.h"

namespace lockstep::detail {

/// Parameters of one dtype in one contiguous buffer, divided into one share per rank. Each rank updates its share and
/// receives the other ranks' shares. Not thread-safe.
class ShardedMemory {
 public:
  /// Moves the parameters into the buffer. They keep their values and, if dense, their strides; pointers to the old
  /// storage become stale. All ranks must pass the same parameters.
  ShardedMemory(const ProcessGroup& group, std::vector<at::Tensor> parameters, ShardBy by);

  /// The pieces of parameters in this rank's share.
  const std::vector<ShardPiece>& pieces() const { return pieces_; }
  /// Returns the elements of a piece: flat, or in the parameter's sizes if the piece is the whole parameter. Shares
  /// memory with the parameter.
  at::Tensor values(const ShardPiece& piece) const;
  /// The same for the parameter's gradient; undefined if there is none. May be a copy.
  at::Tensor gradient(const ShardPiece& piece) const;

  /// If the parameter's storage was replaced, copies its values to the buffer and makes the buffer its storage again.
  /// Returns false if its sizes, dtype or device have changed.
  bool restore_storage(size_t parameter) const;

  /// Sends this rank's share to all ranks and receives theirs. Collective.
  void gather() const;

 private:
  bool is_whole(const ShardPiece& piece) const { return piece.size == parameters_[piece.parameter].numel(); }

  const ProcessGroup group_;
  const std::vector<at::Tensor> parameters_;
  ShardPlan plan_;
  std::vector<ShardPiece> pieces_;
  at::Tensor memory_;
  std::vector<at::Tensor> shares_;  // views of memory_, by rank
  std::vector<at::Tensor> homes_;   // views of memory_, by parameter
};

}  // namespace lockstep::detail
