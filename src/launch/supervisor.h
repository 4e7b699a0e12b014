#pragma once

#include <string>
#include <vector>

#include "launch/channel.h"

namespace lockstep {

/// Runs the supervisor, the process between the launcher and its workers. Returns the exit code. The supervisor has one
/// thread, so it can fork safely, and it outlives the launcher long enough to kill all processes that the launcher
/// started.
///
/// Messages to the supervisor:
///   "secret", bytes         write the job's secret to a file in a folder that is removed with the supervisor
///   "folder"                create this folder without a secret
///   "start", index, argument list, environment list, cores list (lists encoded by pack()); attached files: stdout and
///                           stderr of the worker
///   "signal", number        send it to the process group of every worker that has not ended
/// Messages from the supervisor:
///   "folder", path          the folder that has the file "secret" and the workers' note (LOCKSTEP_RUN_NOTE)
///   "started", index, pid
///   "refused", index, errno the worker could not be executed
///   "ended", index, status of waitpid, "stopped" if a "signal" message killed it, else ""
///   "failed", why           the supervisor's own error, before it ends
/// When the channel is closed, for any reason, the supervisor kills all its descendants and exits.
int run_supervisor(Channel channel);

/// The variable with the path of the secret file; the supervisor sets it for workers if it has written the file.
inline constexpr const char* kSecretVariable = "LOCKSTEP_SECRET_FILE";

}  // namespace lockstep
