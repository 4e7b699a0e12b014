#pragma once

#include <cstddef>

#include <lockstep/state_traits.h>
#include <lockstep/value.h>

#include "optim/zero/shard.h"

// Saving and loading the state of a sharded optimizer: complete, or each rank its own part. Any number of ranks can
// load a state that any other number of ranks has saved.

namespace lockstep::detail {

/// Returns the complete state on rank `dst`, None on others. Collective. Throws UsageError on all ranks if a
/// step of one of them did not finish.
Value consolidated_state(const Shard& shard, int dst);
/// Loads this rank's part of a complete state. Not collective. Throws UsageError if the state is of another model or
/// optimizer.
void load_state(Shard& shard, const Value& value);

/// Returns this rank's part, in the format of checkpoint/shards.h, with the tensors of the optimizer. Not collective.
Value state_of_shard(const Shard& shard);
/// Loads this rank's part from the shards of all ranks that saved. Not collective. Throws UsageError if the shards are
/// of another model or optimizer, and CheckpointError if a shard is missing or damaged.
void load_shards(Shard& shard, size_t shards, const ReadShard& read);

}  // namespace lockstep::detail
