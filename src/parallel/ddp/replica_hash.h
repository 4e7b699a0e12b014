#pragma once

#include <string>
#include <vector>

#include <lockstep/process_group.h>

#include "parallel/ddp/reducer.h"

namespace lockstep {

/// Collective. MismatchError on every rank, naming the first tensor that differs and the ranks that differ from rank 0,
/// unless all ranks hold the same bits.
void check_equal(const std::vector<NamedParameter>& tensors, const ProcessGroup& group);

}  // namespace lockstep
