#pragma once

#include <lockstep/process_group.h>

// Scenarios of failing_rank for one of two ranks over shm: what one rank does to another's memory.

/// Rank 1 stops itself in the middle of a call, by SIGSTOP. Rank 0 then gives up, when it is told to, writes to its
/// tensor at once, and looks, when it is told to, whether it still has what it wrote.
void stop_in_all_reduce(const lockstep::ProcessGroup& world);
void stop_in_broadcast(const lockstep::ProcessGroup& world);

/// Rank 1 is killed after some calls and messages. `join` makes the group, which is to leave no shared memory behind.
void free_memory_after_a_kill(const std::function<lockstep::ProcessGroup()>& join);
