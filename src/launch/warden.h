#pragma once

#include <string>
#include <vector>

#include "launch/channel.h"

namespace lockstep {

/// The warden is a process between the launcher and its workers: it has one thread, so it may fork, and it outlives the
/// launcher by as long as it takes to kill everything the launcher started.
///
/// It is told, over its channel:
///   "secret", bytes         write the job's secret to a file of a folder that goes with the warden
///   "start", index, argument list, environment list, cores list (lists as pack() makes them); two files: its stdout
///                           and stderr
///   "signal", number        to the process group of every worker that has not ended
/// and tells:
///   "folder", path          where the secret is, as a file "secret"
///   "started", index, pid
///   "refused", index, errno it could not be executed
///   "ended", index, status  as waitpid has it
/// When the channel ends, whoever ended it, it kills all that descends from it and exits.
int run_warden(Channel channel);

/// The variable that names the secret's file for workers, which the warden adds when it has written one.
inline constexpr const char* kSecretVariable = "LOCKSTEP_SECRET_FILE";

}  // namespace lockstep
