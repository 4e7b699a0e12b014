#pragma once

namespace lockstep {

/// How values of several ranks become one. Which operation takes which dtype: docs/collectives.md.
enum class ReduceOp {
  kSum,      // integers wrap around; bool: or
  kAvg,      // floating point only
  kProduct,  // integers wrap around; bool: and
  kMin,      // a NaN on any rank gives NaN
  kMax,      // a NaN on any rank gives NaN
  kAnd,      // integers: bitwise; bool: logical
  kOr,
  kXor,
};

}  // namespace lockstep
