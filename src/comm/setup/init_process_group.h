#pragma once

#include <memory>

#include <lockstep/process_group.h>

#include "comm/group/group.h"

namespace lockstep::detail {

/// Implements init_process_group: joins the job and returns the world group. Collective.
std::shared_ptr<Group> init_group(const ProcessGroupOptions& options);

}  // namespace lockstep::detail
