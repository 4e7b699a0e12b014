#pragma once

#include <cstdint>

#include <lockstep/export.h>
#include <lockstep/process_group.h>

namespace lockstep {

struct SeedOptions {
  /// All ranks get `seed` itself, for example to build equal models without copying them.
  bool same_on_all_ranks = false;
};

/// Seeds LibTorch's default generators, of the CPU and of all GPUs, and std::rand. Returns the seed that was set. Not
/// collective.
///
/// With a group, each rank gets a seed of its own, computed from `seed` and its rank, so that dropout differs between
/// ranks. Neighbouring seeds and ranks have unrelated random numbers: rank 1 with seed 5 does not repeat rank 0 with
/// seed 6. Ranks that are threads (run_threads) share LibTorch's generators; the last call decides. Throws UsageError
/// if this process is not in the group.
LOCKSTEP_EXPORT uint64_t seed_everything(uint64_t seed);
LOCKSTEP_EXPORT uint64_t seed_everything(uint64_t seed, const ProcessGroup& group, const SeedOptions& options = {});

}  // namespace lockstep
