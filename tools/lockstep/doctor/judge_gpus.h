#pragma once

#include "doctor/finding.h"
#include "doctor/gpus.h"
#include "doctor/probe.h"

namespace lockstep::tool {

// Facts in, a finding out: pure, and tested with facts that are made up.

/// Whether anything here speaks of GPUs: the machine, or a build that is made for them.
bool speaks_of_gpus(const Gpus& gpus, const Probe& probe);

/// Whether NVIDIA's driver is here and answers. Where it does not, and LibTorch sees no GPU either, the others have
/// nothing to add.
Finding judge_driver(const Gpus& gpus, const Probe& probe);

/// How many GPUs there are and which, and whether the `ranks` on this host would train on them.
Finding judge_gpus(const Gpus& gpus, const Probe& probe, int ranks);

/// Whether processes may use the GPUs that are installed and visible.
Finding judge_compute_modes(const Gpus& gpus);

}  // namespace lockstep::tool
