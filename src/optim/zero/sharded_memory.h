#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/process_group.h>
#include "optim/zero/shard_plan.h"

namespace lockstep::detail {

// Call sites, for error messages.
inline const CallOptions kInStep{.site = {"step of ZeroRedundancyOptimizer", 0}};
inline const CallOptions kInConstructor{.site = {"constructor of ZeroRedundancyOptimizer", 0}};
inline const CallOptions kInBackward{.site = {"backward of DistributedDataParallel, for ZeroRedundancyOptimizer", 0}};

/// Whether the tensor lies in a ShardedMemory that all ranks share: a write of one rank changes it on all ranks.
bool is_shared_between_ranks(const at::Tensor& tensor);

/// Parameters of one dtype in one contiguous buffer, divided into one share per rank. Each rank updates its share and
/// receives the other ranks' shares, or all ranks have the same buffer. Not thread-safe.
class ShardedMemory {
 public:
  /// Whether each rank has a buffer of its own, or all ranks share one.
  enum class Buffer { kOwn, kShared };

  /// Copies the values of the parameters into the buffer: into a shared buffer, the values of rank 0. All ranks must
  /// pass the same parameters.
  ShardedMemory(const ProcessGroup& group, std::vector<at::Tensor> parameters, ShardBy by, Buffer buffer);

  /// Makes the buffer the memory of the parameters. They keep their sizes and, if dense, their strides; pointers to the
  /// old storage become stale.
  void move_parameters() const;

  /// Returns the first parameter whose values differ from those in the buffer, bit for bit.
  std::optional<size_t> first_difference() const;

  /// The pieces of parameters in this rank's share.
  const std::vector<ShardPiece>& pieces() const { return pieces_; }
  std::vector<ShardPiece> pieces_of(int rank) const;
  /// Returns the elements of a piece: flat, or in the parameter's sizes if the piece is the whole parameter. Shares
  /// memory with the parameter.
  at::Tensor values(const ShardPiece& piece) const { return values(piece, memory_); }
  /// The same in another buffer of elements() elements.
  at::Tensor values(const ShardPiece& piece, const at::Tensor& buffer) const;
  /// The same in a buffer that has only this rank's share.
  at::Tensor values_in_share(const ShardPiece& piece, const at::Tensor& share) const;
  int64_t elements() const { return plan_.elements(); }
  int64_t share_elements() const { return plan_.size_of(group_.rank()); }
  const std::vector<int64_t>& offsets() const { return plan_.offsets; }  // of parameters, in elements
  at::ScalarType dtype() const { return memory_.scalar_type(); }
  /// The same for the parameter's gradient; undefined if there is none. May be a copy.
  at::Tensor gradient(const ShardPiece& piece) const;

  /// If the parameter's storage was replaced, copies its values to the buffer and makes the buffer its storage again.
  /// Returns false if its sizes, dtype or device have changed.
  bool restore_storage(size_t parameter) const;

  /// Sends this rank's share to all ranks and receives theirs. Does not change the parameters' versions. Collective.
  /// Not for a shared buffer.
  void gather(const CallOptions& options) const;
  [[nodiscard]] Work gather_async(const CallOptions& options) const;
  /// Averages a buffer of elements() elements over all ranks. `share` gets this rank's share. Collective.
  void reduce_scatter(const at::Tensor& share, const at::Tensor& buffer, const CallOptions& options) const;
  [[nodiscard]] Work reduce_scatter_async(const at::Tensor& share, const at::Tensor& buffer,
                                          const CallOptions& options) const;

 private:
  bool is_whole(const ShardPiece& piece) const { return piece.size == parameters_[piece.parameter].numel(); }
  at::Tensor values_at(int64_t offset, const ShardPiece& piece, const at::Tensor& buffer) const;
  std::vector<at::Tensor> shares_of(const at::Tensor& buffer) const;

  const ProcessGroup group_;
  const std::vector<at::Tensor> parameters_;
  ShardPlan plan_;
  std::vector<ShardPiece> pieces_;
  at::Tensor memory_;
  std::vector<at::Tensor> parameter_views_;  // views of memory_, by parameter
  at::Tensor sent_;                 // alias of memory_ with its own version, so gather() changes no view's version
  std::vector<at::Tensor> shares_;  // views of sent_, by rank
};

}  // namespace lockstep::detail
