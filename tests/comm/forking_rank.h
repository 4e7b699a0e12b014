#pragma once

#include <lockstep/process_group.h>

/// Scenarios of failing_rank for one of two ranks. Both throw std::runtime_error when something is not as it must be.

/// Forks children that try to use all that the rank has, destroy it and exit, while a call is pending and later.
void fork_and_go_on(const lockstep::ProcessGroup& world);

/// What every call must do in a forked child: throw a UsageError that names the rank whose process it was forked from.
void require_refused_in_child(const lockstep::ProcessGroup& world);
