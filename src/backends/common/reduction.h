#pragma once

#include <cstdint>
#include <span>

#include <c10/core/ScalarType.h>

#include <lockstep/reduce_op.h>

namespace lockstep {

/// The operation as users write it: "sum", "avg", ...
const char* name_of(ReduceOp op);

/// Whether docs/collectives.md has a result for the operation on this dtype.
bool is_reducible(ReduceOp op, c10::ScalarType dtype);

/// Every output[i] = op over inputs[0][i], inputs[1][i], ..., in that order; kAvg divides by the number of inputs.
/// Outputs may be inputs. Requires is_reducible(op, dtype).
void reduce_elements(std::span<void* const> outputs, std::span<const void* const> inputs, int64_t count,
                     c10::ScalarType dtype, ReduceOp op);

inline void reduce_elements(void* output, std::span<const void* const> inputs, int64_t count, c10::ScalarType dtype,
                            ReduceOp op) {
  reduce_elements({&output, 1}, inputs, count, dtype, op);
}

/// Multiplies by 1 / `ranks`, as kAvg does after the sum. Requires a floating-point dtype.
void scale_elements(void* data, int64_t count, c10::ScalarType dtype, int ranks);

}  // namespace lockstep
