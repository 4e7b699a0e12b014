#pragma once

#include "doctor/finding.h"
#include "doctor/machine.h"
#include "doctor/probe.h"

namespace lockstep::tool {

// Facts in, a finding out: pure, and tested with facts that are made up.

/// Whether LibTorch could be asked, and which it is. The others are about a probe that has no failure.
Finding judge_torch(const Probe& probe);

Finding judge_blas(const Probe& probe, const Machine& machine);

/// Whether convolutions are faster without MKL-DNN, as with Debian's LibTorch 1.13 for arm64.
Finding judge_convolutions(const Probe& probe, const Machine& machine);

Finding judge_backends(const Probe& probe);

}  // namespace lockstep::tool
