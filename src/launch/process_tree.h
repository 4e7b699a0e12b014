#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

namespace lockstep {

/// All children of the process, their children and so on, as /proc has them now. Zombies are left out, but not what
/// they left behind.
std::vector<pid_t> descendants_of(pid_t process);

/// What the process does, for people: "python3, sleeping"; "ended" when it is gone.
std::string describe_process(pid_t process);

/// Kills every descendant of this process and reaps it, until none is left or the time is up; whether none is left.
/// This process must be the subreaper of those whose parents are gone.
bool kill_descendants(std::chrono::milliseconds limit = std::chrono::seconds(10));

}  // namespace lockstep
