#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/process_group.h>
#include "optim/shard_plan.h"

namespace lockstep::detail {

/// Parameters of one dtype, moved into one piece of memory, of which each rank updates its share and takes the others'.
/// Not thread-safe.
class ShardedMemory {
 public:
  /// The parameters keep their values and layouts, and live here from now on. All ranks give the same ones.
  ShardedMemory(const ProcessGroup& group, std::vector<at::Tensor> parameters, ShardBy by);

  /// This rank's.
  const std::vector<ShardPiece>& pieces() const { return pieces_; }
  /// The elements of a piece, in the parameter's own sizes when it is all of it. Shares memory with the parameter.
  at::Tensor values(const ShardPiece& piece) const;
  /// The same of the parameter's gradient; undefined when there is none.
  at::Tensor gradient(const ShardPiece& piece) const;

  /// A parameter that was given other memory brings its values back. False when it has become another kind of tensor.
  bool restore_storage(size_t parameter) const;

  /// Every rank has the shares of all. Collective.
  void gather() const;

 private:
  bool is_whole(const ShardPiece& piece) const { return piece.size == parameters_[piece.parameter].numel(); }

  const ProcessGroup group_;
  const std::vector<at::Tensor> parameters_;
  ShardPlan plan_;
  std::vector<ShardPiece> pieces_;
  at::Tensor memory_;
  std::vector<at::Tensor> shares_;  // of it, by rank
  std::vector<at::Tensor> homes_;   // where each parameter lives
};

}  // namespace lockstep::detail
