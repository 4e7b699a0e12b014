#pragma once

#include <functional>

#include <lockstep/process_group.h>

namespace lockstep {

struct RunThreadsOptions {
  /// "threads", or any backend that can join within one process.
  std::string backend = "threads";
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

/// Runs `rank_main` once for every rank, each on its own thread of this process: for gdb, sanitizers and unit tests.
///
/// Returns when all ranks have returned. When a rank throws, the others are woken with PeerError (one that is still
/// joining gives up after the time-out), and the error of the rank that failed first is thrown here: lockstep's kinds
/// as they are, others as an Error with the original nested, all with the rank in the message.
LOCKSTEP_EXPORT void run_threads(int world_size, const std::function<void(ProcessGroup)>& rank_main,
                                 const RunThreadsOptions& options = {});

}  // namespace lockstep
