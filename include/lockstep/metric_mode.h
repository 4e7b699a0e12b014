#pragma once

namespace lockstep {

/// Which value of a metric is the best: `mode` of PyTorch's ReduceLROnPlateau.
enum class MetricMode {
  kMin,  ///< the lowest
  kMax,  ///< the highest
};

}  // namespace lockstep
