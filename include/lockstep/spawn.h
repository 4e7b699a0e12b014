#pragma once

#include <chrono>
#include <functional>
#include <string>

#include <lockstep/export.h>
#include <lockstep/process_group.h>

namespace lockstep {

struct SpawnOptions {
  /// See ProcessGroupOptions.
  std::string backend = "auto";
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  /// Time limit of the whole spawn() call. 0: no limit.
  std::chrono::milliseconds join_timeout{0};
  /// After a rank has failed, how long the other ranks may take to exit before they are killed.
  std::chrono::milliseconds grace = std::chrono::seconds(10);
};

/// Runs `rank_main` in `world_size` processes, one for each rank, and blocks until all have returned.
///
/// A rank is this program, started again with the same arguments. It runs main() up to this call, where it joins its
/// group, runs `rank_main` and exits without returning. So every rank also executes the code before this call, and
/// variables captured by `rank_main` are those of the rank's own process, not of the parent. Guard side effects with
/// `if (!lockstep::is_spawned())`. (spawn does not fork, because LibTorch's thread pools do not survive a fork.) Parent
/// and ranks identify a call of spawn() by how many such calls came before it, so make the same calls in the same
/// order, from one thread. A rank cannot call spawn() itself.
///
/// If `rank_main` throws, spawn() throws in the parent. lockstep's errors keep their type; other exceptions become an
/// Error that names their type. The message begins with the rank. If a rank is killed or exits early, spawn() throws
/// PeerError with the reason. The first failure is reported; the other ranks are notified of it and have the grace time
/// to exit. Throws TimeoutError after join_timeout. All ranks are killed when this process ends.
LOCKSTEP_EXPORT void spawn(int world_size, const std::function<void(ProcessGroup)>& rank_main,
                           const SpawnOptions& options = {});

/// Returns whether spawn() has started this process as a rank.
LOCKSTEP_EXPORT bool is_spawned();

}  // namespace lockstep
