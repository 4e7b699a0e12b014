#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

#include <lockstep/reduce_op.h>

namespace lockstep::bench {

/// Test data that reveal wrong results: a value depends on the rank and the position, and sums over ranks are exact in
/// every dtype. The data repeat after a prime number of elements, so that the period never coincides with a part of a
/// message.
inline constexpr int64_t kPeriod = 4093;

/// One period of the input of `rank`.
at::Tensor input_table(int rank, at::ScalarType dtype, ReduceOp op);

/// One period of the reduction over the inputs of `ranks` ranks.
at::Tensor reduced_table(int ranks, at::ScalarType dtype, ReduceOp op);

/// tensor[i] = table[(offset + i) % kPeriod]. The tensor is contiguous, on any device; the table is on the CPU.
void write_pattern(const at::Tensor& tensor, const at::Tensor& table, int64_t offset);

/// The number of elements that differ from the pattern of write_pattern by more than `tolerance` times their value.
int64_t count_wrong(const at::Tensor& tensor, const at::Tensor& table, int64_t offset, double tolerance = 0);

/// The relative tolerance of a result: averages round in an order that depends on the backend.
double tolerance_of(at::ScalarType dtype, ReduceOp op);

at::ScalarType dtype_named(const std::string& name);
ReduceOp reduce_op_named(const std::string& name);  // "none": kSum

}  // namespace lockstep::bench
