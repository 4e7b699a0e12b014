#pragma once

#include <string>
#include <vector>

#include <lockstep/checkpoint_file.h>
#include <lockstep/value.h>

// Sharded checkpoints. The file of rank 0 has an entry "shards", a list of {"file", "sha256"}. Each of these files is a
// dict with a shard of each sharded object, by the object's name.

namespace lockstep::detail {

constexpr const char* kShards = "shards";

Value list_of_shards(const std::vector<ShardFile>& shards);

/// Describes the damage of a shard's file; empty if it is intact. Reads the whole file.
std::string verify_shard(const std::string& folder, const ShardFile& shard);
/// Throws CheckpointError if the file is missing, damaged or of another checkpoint.
Value load_shard(const std::string& folder, const ShardFile& shard, const LoadOptions& options);

/// Returns the state_dict of an optimizer, as Python has it, from all of its shards. A shard is a dict:
///   "param_groups"  as in the state_dict
///   "sizes", "strides"  of each parameter
///   "pieces"  a list of {"parameter", "begin", "size", "state"}: a range of a parameter's elements, in memory order,
///             and its state. Tensors of the state that have one element for each element are flat.
/// Throws CheckpointError if the shards do not fit together.
Value merge_shards(const std::vector<Value>& shards);

}  // namespace lockstep::detail
