#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

namespace lockstep {

/// Returns all descendants of the process according to /proc. Zombies are omitted, but their descendants are included.
std::vector<pid_t> descendants_of(pid_t process);

/// Describes the process: "python3, sleeping", or "ended".
std::string describe_process(pid_t process);

/// Kills and reaps all descendants of this process until none is left or the time limit is reached. Returns whether
/// none is left. This process must be a child subreaper, so that orphaned descendants become its children.
bool kill_descendants(std::chrono::milliseconds limit = std::chrono::seconds(10));

}  // namespace lockstep
