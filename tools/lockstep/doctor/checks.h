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

// The checks of `lockstep doctor`: each maps facts to a finding. All are pure; tests pass made-up facts.
// `ranks` is the number of ranks on this host, `world_size` the number of ranks of the job.

// --- Job and folders

/// Checks that the variables set by a launcher are consistent.
Finding check_job(const Rendezvous& rendezvous);

Finding check_secret(const SecretFile& secret, const Rendezvous& rendezvous, const Network& network);

Finding check_folder(const Folder& folder);

// --- Network

Finding check_host_name(const Rendezvous& rendezvous, const Network& network);

// The next three checks need a rendezvous at an address; the last two also need a route to that address.

/// Checks that the ranks can reach the rendezvous address.
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

/// `serves_nccl`: whether NCCL would use /dev/shm between the ranks on this host.
Finding check_shared_memory(const Machine& machine, bool serves_nccl);

Finding check_open_files(const Machine& machine, int world_size);
Finding check_processes(const Machine& machine, int ranks);
Finding check_locked_memory(const Machine& machine);
Finding check_clock(const Machine& machine, bool spans_hosts);

// --- LibTorch

/// Checks that the probe of LibTorch worked, and reports the LibTorch that it found. The next three checks need a probe
/// without failure.
Finding check_torch(const Probe& probe);

Finding check_blas(const Probe& probe, const Machine& machine);

/// Checks whether convolutions are faster without MKL-DNN, as with Debian's LibTorch 1.13 for arm64.
Finding check_convolutions(const Probe& probe, const Machine& machine);

Finding check_backends(const Probe& probe);

// --- GPUs

/// Whether this machine has GPUs or this build supports them. If not, the GPU checks are skipped.
bool gpus_are_relevant(const Gpus& gpus, const Probe& probe);

/// Checks that NVIDIA's driver is loaded and answers. If not, and LibTorch sees no GPU either, the other GPU checks add
/// nothing.
Finding check_driver(const Gpus& gpus, const Probe& probe);

/// Lists the GPUs and checks whether the `ranks` on this host would train on them.
Finding check_gpus(const Gpus& gpus, const Probe& probe, int ranks);

/// Checks that the compute mode lets processes use the visible GPUs.
Finding check_compute_modes(const Gpus& gpus);

/// Checks, on a machine with GPUs, that this build has NCCL.
Finding check_nccl(const Probe& probe);

/// `named`: the value of NCCL_SOCKET_IFNAME, not empty. `spans_hosts`: the job has ranks on other hosts.
Finding check_nccl_interface(const std::string& named, const Network& network, bool spans_hosts);

/// `nccl`: the variables that NCCL reads.
Finding check_nccl_variables(const Variables& nccl, size_t gpus, bool has_infiniband);

/// Whether the variable is set to a number other than 0, as NCCL reads a flag.
bool is_on(const Variables& nccl, const std::string& name);

}  // namespace lockstep::tool
