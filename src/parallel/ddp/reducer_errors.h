#pragma once

#include <cstdint>
#include <string>

#include <lockstep/error.h>
#include <lockstep/process_group.h>

namespace lockstep {

// What a Reducer reports when a backward cannot be reduced.

UsageError interrupted_backward(int rank);
UsageError forward_in_backward(int rank);
UsageError unexpected_gradient(int rank, const std::string& parameter);

/// Throws UsageError in a backward with create_graph.
void refuse_create_graph(int rank);

/// Throws an error that names the first parameter of each rank whose gradient is not finite; `mine` is empty if this
/// rank has none. Collective.
[[noreturn]] void throw_not_finite(const ProcessGroup& group, const std::string& mine, int64_t reductions);

}  // namespace lockstep
