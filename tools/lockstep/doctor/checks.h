#pragma once

#include <optional>
#include <string>

#include "doctor/env_report.h"
#include "doctor/findings.h"
#include "doctor/gpus.h"
#include "doctor/machine.h"
#include "doctor/network.h"
#include "doctor/storage.h"
#include "doctor/torch_probe.h"

namespace lockstep::tool {

// The checks of `lockstep doctor`: each maps facts to a finding. All are pure, so that tests pass made-up facts.
// `ranks` is the number of ranks on this host, `world_size` that of the job.

// --- Job and folders

/// Whether the variables that a launcher sets make sense together.
Finding check_job(const Rendezvous& rendezvous);

Finding check_secret(const SecretFile& secret, const Rendezvous& rendezvous, const Network& network);

Finding check_folder(const Folder& folder);

// --- Network

Finding check_host_name(const Rendezvous& rendezvous, const Network& network);

// The others are about a meeting at an address; the last two, about one that a way leads to.

/// Whether the ranks find the way to where they meet.
Finding check_rendezvous_address(const Rendezvous& rendezvous, const Network& network);

/// `named`: the value of LOCKSTEP_INTERFACE.
Finding check_interface(const Rendezvous& rendezvous, const Network& network, const std::optional<std::string>& named);

Finding check_port(const Rendezvous& rendezvous, const Network& network);

// --- Machine

Finding check_cores(const Machine& machine, int ranks);

/// `variable`: the value of OMP_NUM_THREADS.
Finding check_threads(const Machine& machine, int ranks, const std::optional<std::string>& variable);

Finding check_memory(const Machine& machine, int ranks);
Finding check_numa(const Machine& machine, int ranks);

/// `serves_nccl`: whether NCCL's ranks on this host would use it.
Finding check_shared_memory(const Machine& machine, bool serves_nccl);

Finding check_open_files(const Machine& machine, int world_size);
Finding check_processes(const Machine& machine, int ranks);
Finding check_locked_memory(const Machine& machine);
Finding check_clock(const Machine& machine, bool spans_hosts);

// --- LibTorch

/// Whether LibTorch could be asked, and which it is. The others are about a probe that has no failure.
Finding check_torch(const Probe& probe);

Finding check_blas(const Probe& probe, const Machine& machine);

/// Whether convolutions are faster without MKL-DNN, as with Debian's LibTorch 1.13 for arm64.
Finding check_convolutions(const Probe& probe, const Machine& machine);

Finding check_backends(const Probe& probe);

// --- GPUs

/// Whether anything here speaks of GPUs: the machine, or a build that is made for them.
bool gpus_are_relevant(const Gpus& gpus, const Probe& probe);

/// Whether NVIDIA's driver is here and answers. Where it does not, and LibTorch sees no GPU either, the others have
/// nothing to add.
Finding check_driver(const Gpus& gpus, const Probe& probe);

/// How many GPUs there are and which, and whether the `ranks` on this host would train on them.
Finding check_gpus(const Gpus& gpus, const Probe& probe, int ranks);

/// Whether processes may use the GPUs that are installed and visible.
Finding check_compute_modes(const Gpus& gpus);

/// Whether this build joins GPUs, on a machine that has some.
Finding check_nccl(const Probe& probe);

/// `named`: the value of NCCL_SOCKET_IFNAME, which is not empty. `spans_hosts`: ranks run on other hosts, too.
Finding check_nccl_interface(const std::string& named, const Network& network, bool spans_hosts);

/// `nccl`: the variables that NCCL reads.
Finding check_nccl_variables(const Variables& nccl, size_t gpus, bool has_infiniband);

/// Whether the variable is there and has a number other than 0, which is how NCCL reads a switch.
bool is_on(const Variables& nccl, const std::string& name);

}  // namespace lockstep::tool
