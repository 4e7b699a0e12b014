#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

#include <lockstep/reduce_op.h>

namespace lockstep::bench {

/// Data that tell a wrong result: a value depends on the rank and on the position, and sums over ranks are exact in
/// every dtype. It repeats after a prime number of elements, so that no division of a message into parts meets it.
inline constexpr int64_t kPeriod = 4093;

/// One period of what rank `rank` gives.
at::Tensor input_table(int rank, at::ScalarType dtype, ReduceOp op);

/// One period of what becomes of the inputs of `ranks` ranks.
at::Tensor reduced_table(int ranks, at::ScalarType dtype, ReduceOp op);

/// tensor[i] = table[(offset + i) % kPeriod]. The tensor is contiguous, on any device; the table is on the CPU.
void write_pattern(const at::Tensor& tensor, const at::Tensor& table, int64_t offset);

/// How many elements differ from what write_pattern would have written, by more than `tolerance` times their value.
int64_t count_wrong(const at::Tensor& tensor, const at::Tensor& table, int64_t offset, double tolerance = 0);

/// How far a result may be off: averages are rounded in an order that is not ours to say.
double tolerance_of(at::ScalarType dtype, ReduceOp op);

at::ScalarType dtype_named(const std::string& name);
ReduceOp reduce_op_named(const std::string& name);  // "none": kSum

}  // namespace lockstep::bench
