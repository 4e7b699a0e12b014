#pragma once

#include <string>

#include "doctor/finding.h"
#include "doctor/network.h"
#include "doctor/probe.h"
#include "doctor/variables.h"

namespace lockstep::tool {

// Facts in, a finding out: pure, and tested with facts that are made up.

/// Whether this build joins GPUs, on a machine that has some.
Finding judge_nccl(const Probe& probe);

/// `named`: the value of NCCL_SOCKET_IFNAME, which is not empty. `beyond_this_host`: ranks run on other hosts, too.
Finding judge_nccl_interface(const std::string& named, const Network& network, bool beyond_this_host);

/// `nccl`: the variables that NCCL reads.
Finding judge_nccl_variables(const Variables& nccl, size_t gpus, bool has_infiniband);

/// Whether the variable is there and has a number other than 0, which is how NCCL reads a switch.
bool is_on(const Variables& nccl, const std::string& name);

}  // namespace lockstep::tool
