#pragma once

#include <utility>

#include <lockstep/comm_hook.h>

namespace lockstep {

/// A comm hook that averages the whole buffer of a bucket. It may approximate matrices, but it averages
/// one-dimensional gradients in 16-bit precision or better. The last bucket that it receives therefore ends with the
/// reducer's marks (Bucket::extra), as one more gradient without a parameter: they need no all-reduce of their own.
///
/// A Bucket recognizes an AveragingHook by its type inside of the CommHook. A user's hook that calls one gets no marks.
struct AveragingHook {
  CommHook hook;

  FinishReduction operator()(const GradientBucket& bucket, const ProcessGroup& group) const {
    return hook(bucket, group);
  }
};

}  // namespace lockstep
