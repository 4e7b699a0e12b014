#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/process_group.h>

#include "optim/zero/sharded_memory.h"

namespace lockstep::detail {

/// The parameters of a ZeroRedundancyOptimizer, in memory that is divided between the ranks of a group. Each rank
/// updates its pieces. Not thread-safe.
class ShardedParameters {
 public:
  using Buffer = ShardedMemory::Buffer;

  struct Parameter {
    at::Tensor tensor;
    size_t group;  // index of its parameter group
  };
  struct Memory {
    std::vector<size_t> members;  // indices of parameters
    ShardedMemory memory;
  };
  /// The part of one parameter that this rank updates.
  struct Piece {
    size_t memory;         // index into memories()
    ShardPiece in_memory;  // its parameter is an index into Memory::members
    ShardPiece overall;    // its parameter is an index of a parameter
  };

  /// `names` has a name for each parameter, or none. Moves the parameters of each dtype into one memory; those that all
  /// ranks share, into several. Collective. Throws on all ranks: UsageError if a parameter cannot be divided, or cannot
  /// be shared; MismatchError if the parameters differ between the ranks.
  ShardedParameters(ProcessGroup group, std::vector<Parameter> parameters, std::vector<std::string> names, ShardBy by,
                    Buffer buffer);

  const ProcessGroup& group() const { return group_; }
  bool are_shared() const { return buffer_ == Buffer::kShared; }
  size_t size() const { return parameters_.size(); }
  const at::Tensor& tensor(size_t parameter) const { return parameters_[parameter].tensor; }
  size_t group_of(size_t parameter) const { return parameters_[parameter].group; }
  const std::vector<std::string>& names() const { return names_; }
  /// For messages: "parameter 'fc.weight'".
  std::string name_of(size_t parameter) const;
  std::optional<size_t> find(const at::Tensor& tensor) const;

  const std::vector<Memory>& memories() const { return memories_; }
  /// In the order of the parameters.
  const std::vector<Piece>& pieces() const { return pieces_; }
  bool is_whole(const ShardPiece& piece) const { return piece.size == tensor(piece.parameter).numel(); }
  at::Tensor values(const Piece& piece) const { return memories_[piece.memory].memory.values(piece.in_memory); }
  at::Tensor gradient(const Piece& piece) const { return memories_[piece.memory].memory.gradient(piece.in_memory); }

  /// Divides the parameters again: one memory for each list of parameters of one dtype, then memories for the remaining
  /// parameters. Not for shared parameters. Collective.
  void divide(const std::vector<std::vector<size_t>>& lists);

  /// All-gathers the pieces of the first `memories` memories; a barrier if the ranks share the parameters. Collective.
  void publish_updates(size_t memories) const;

  /// Parameters that the program has written to, or whose memory it has replaced, since note_values().
  std::vector<size_t> written() const;
  /// Records the versions that written() compares with: of all parameters, or of one.
  void note_values();
  void note_values(size_t parameter);
  /// Moves values in replaced memory back. Throws UsageError if a parameter has changed its device, dtype or sizes.
  void restore_memory() const;
  /// For shared parameters, each of which must be written by every rank or by none: throws MismatchError on all ranks
  /// otherwise. `written` are the parameters that this rank has written. When it returns, all ranks are done with the
  /// old values. Collective.
  void agree_on_writes(const std::vector<size_t>& written) const;

 private:
  std::string why_not_divisible() const;
  void check_alike() const;
  void check_can_share() const;
  void check_equal_values() const;
  void add_memory(const std::vector<size_t>& members);
  std::vector<std::vector<size_t>> segments(const std::vector<size_t>& members) const;
  using Version = std::pair<uint64_t, const void*>;  // autograd's version, and the address
  Version version_of(size_t parameter) const;

  const ProcessGroup group_;
  const std::vector<Parameter> parameters_;
  const std::vector<std::string> names_;
  const ShardBy by_;
  const Buffer buffer_;
  std::unordered_map<const c10::TensorImpl*, size_t> indices_;  // constant after construction
  std::vector<Memory> memories_;
  std::vector<Piece> pieces_;
  std::vector<Version> noted_;  // by parameter
};

}  // namespace lockstep::detail
