#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <c10/core/ScalarType.h>

#include <lockstep/backend.h>
#include <lockstep/reduce_op.h>

#include "backends/common/narrow_sums.h"

namespace lockstep {

/// Returns the name that users write: "sum", "avg", ...
const char* name_of(ReduceOp op);

/// Whether any operation is defined for this dtype. Other dtypes can only be moved.
bool has_reductions(c10::ScalarType dtype);

/// Whether the operation is defined for this dtype: see docs/collectives.md.
bool is_reducible(ReduceOp op, c10::ScalarType dtype);

/// Sets element i of every output to the reduction of inputs[0][i], inputs[1][i], ..., in that order. kAvg divides by
/// the number of inputs. An output may be equal to an input. Requires is_reducible(op, dtype).
///
/// A NaN that two or more inputs are reduced to is the positive quiet NaN without a payload (0x7e00, 0x7fc0,
/// 0x7fc00000), for all operations, instructions and positions. One input is copied as it is.
void reduce_elements(std::span<void* const> outputs, std::span<const void* const> inputs, int64_t count,
                     c10::ScalarType dtype, ReduceOp op);

inline void reduce_elements(void* output, std::span<const void* const> inputs, int64_t count, c10::ScalarType dtype,
                            ReduceOp op) {
  reduce_elements({&output, 1}, inputs, count, dtype, op);
}

/// The same for kSum and kAvg of float32 and float64, with given vector instructions of vector_sets(); null: the
/// instructions that every processor has. reduce_elements uses the fastest set. The bits do not depend on the set.
void sum_floats(std::optional<VectorSet> set, std::span<void* const> outputs, std::span<const void* const> inputs,
                int64_t count, c10::ScalarType dtype, ReduceOp op);

/// Implements Backend::reduce_ranges: `inputs` are the tensors of all ranks, by rank.
void reduce_ranges_in_cache(std::span<const void* const> inputs, const at::Tensor& like, ReduceOp op,
                            const std::vector<Backend::Range>& ranges, const Backend::Consume& consume);

/// Multiplies all elements by 1 / `ranks`, as kAvg does after the sum. Requires a floating-point dtype.
void scale_elements(void* data, int64_t count, c10::ScalarType dtype, int ranks);

/// Replaces the NaNs of a float16 or bfloat16 tensor by the NaN that reduce_elements computes. For tensors that
/// LibTorch has narrowed: LibTorch keeps the sign and the payload of some NaNs.
void make_nans_equal(void* data, int64_t count, c10::ScalarType dtype);

}  // namespace lockstep
