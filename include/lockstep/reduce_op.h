#pragma once

namespace lockstep {

/// How to combine the values of all ranks. docs/collectives.md lists the dtypes of each operation.
enum class ReduceOp {
  kSum,      ///< integers wrap around; bool: or
  kAvg,      ///< floating point only
  kProduct,  ///< integers wrap around; bool: and
  kMin,      ///< a NaN on any rank gives NaN
  kMax,      ///< a NaN on any rank gives NaN
  kAnd,      ///< integers: bitwise; bool: logical
  kOr,
  kXor,
};

}  // namespace lockstep
