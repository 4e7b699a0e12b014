#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace lockstep {

/// The two types of 16 bits.
enum class NarrowFloat { kHalf, kBFloat16 };

/// Vector instructions of x86-64 that reductions use. kAvx2 includes F16C, which converts float16.
enum class VectorSet { kAvx2, kAvx512 };

/// Returns the sets of vector instructions that this processor has, the fastest last.
std::vector<VectorSet> vector_sets();

/// Sets element i of every output to (inputs[0][i] + inputs[1][i] + ...) * factor, added in that order as float32 and
/// then rounded to nearest. An output may be equal to an input. The bits are those of the loops in reduction.cpp,
/// NaNs included. Requires a set of vector_sets().
void sum_narrow(VectorSet set, NarrowFloat type, std::span<void* const> outputs, std::span<const void* const> inputs,
                int64_t count, float factor);

}  // namespace lockstep
