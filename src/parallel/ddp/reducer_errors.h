#pragma once

#include <cstdint>
#include <string>

#include <lockstep/error.h>
#include <lockstep/process_group.h>

namespace lockstep {

// The errors of a Reducer when a backward cannot be reduced.

UsageError interrupted_backward(int rank);
UsageError forward_in_backward(int rank);
UsageError unexpected_gradient(int rank, const std::string& parameter);

/// Throws UsageError in a backward with create_graph.
void refuse_create_graph(int rank);

/// Throws an error that names the first parameter of each rank whose gradient is not finite; `own_parameter` is empty
/// if this rank has none. Collective.
[[noreturn]] void throw_not_finite(const ProcessGroup& group, const std::string& own_parameter, int64_t reductions);

}  // namespace lockstep
