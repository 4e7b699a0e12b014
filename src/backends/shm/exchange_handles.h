#pragma once

#include <memory>

#include <lockstep/backend.h>

#include "backends/shm/shm_group.h"

namespace lockstep::shm {

/// Brings the ranks of a group to one group: each shows the others, through the store, where its segment is, and makes
/// sure that it sees theirs. Collective. NoSharedMemory on all of them when some do not.
std::unique_ptr<ShmGroup> exchange_handles(const BackendContext& context);

}  // namespace lockstep::shm
