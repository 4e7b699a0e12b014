#pragma once

#include <functional>

#include <lockstep/process_group.h>

namespace lockstep {

struct RunThreadsOptions {
  /// "threads", or any backend whose ranks can be threads of one process.
  std::string backend = "threads";
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

/// Runs `rank_main` once for each rank, each on its own thread of this process. For gdb, sanitizers and unit tests.
///
/// Blocks until all ranks have returned. If a rank throws, the calls of the other ranks throw PeerError; a rank that is
/// still joining gives up after the time-out. Then run_threads rethrows the error of the rank that failed first:
/// lockstep's errors keep their type, other exceptions are nested in an Error, and the message names the rank.
LOCKSTEP_EXPORT void run_threads(int world_size, const std::function<void(ProcessGroup)>& rank_main,
                                 const RunThreadsOptions& options = {});

}  // namespace lockstep
