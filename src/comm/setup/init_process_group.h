#pragma once

#include <memory>

#include <lockstep/process_group.h>

#include "comm/group/group.h"

namespace lockstep::detail {

/// What stands behind init_process_group: joins the job and returns this rank's end of the group of all.
std::shared_ptr<Group> init_group(const ProcessGroupOptions& options);

}  // namespace lockstep::detail
