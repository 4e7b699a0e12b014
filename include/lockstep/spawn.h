#pragma once

#include <chrono>
#include <functional>
#include <string>

#include <lockstep/export.h>
#include <lockstep/process_group.h>

namespace lockstep {

struct SpawnOptions {
  /// As in ProcessGroupOptions.
  std::string backend = "auto";
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  /// How long all of it may take; forever when zero.
  std::chrono::milliseconds join_timeout{0};
  /// After one rank has failed: how long the others may take to end by themselves before they are killed.
  std::chrono::milliseconds grace = std::chrono::seconds(10);
};

/// Runs `rank_main` as `world_size` processes, one for each rank, and returns when all have returned.
///
/// A rank is this program, started again with the same arguments: it runs main() up to this call, here gets its group,
/// runs `rank_main`, and exits without returning. So what stands before the call is run by every rank, and what the
/// function captures is what the rank itself has made; guard side effects with `if (!lockstep::is_spawned())`. Forking
/// is no way: LibTorch's thread pools do not survive it. Calls are told apart by counting: make the same ones in the
/// same order. Call it from one thread.
///
/// An exception that leaves a rank's function is thrown here: lockstep's errors keep their kind, others become an Error
/// that names their type; the message begins with the rank. A rank that is killed or exits early is a PeerError that
/// says how. The first cause counts; the other ranks get the failure notice and then the grace time. TimeoutError when
/// join_timeout passes. No rank outlives this process.
LOCKSTEP_EXPORT void spawn(int world_size, const std::function<void(ProcessGroup)>& rank_main,
                           const SpawnOptions& options = {});

/// Whether this process is a rank that spawn() has started.
LOCKSTEP_EXPORT bool is_spawned();

}  // namespace lockstep
