#pragma once

#include <string>
#include <variant>

#include <lockstep/environment.h>
#include <lockstep/export.h>

namespace lockstep {

/// A socket address: a host name or numeric address without brackets, and a port.
struct Endpoint {
  std::string host;
  int port = 0;

  bool operator==(const Endpoint&) const = default;
};

/// A rendezvous file that all ranks can open.
struct RendezvousFile {
  std::string path;

  bool operator==(const RendezvousFile&) const = default;
};

/// A rendezvous store that listens on a port.
struct RendezvousPort {
  Endpoint endpoint;
  bool rank_zero_hosts = true;  ///< if false, the launcher hosts the store

  bool operator==(const RendezvousPort&) const = default;
};

using RendezvousPlace = std::variant<RendezvousFile, RendezvousPort>;

/// Default port of a job for which neither a port nor a job name is set; the same as PyTorch's.
inline constexpr int kDefaultPort = 29500;

/// Returns where the ranks of a job rendezvous in init_process_group. `init_method` is "file:///path",
/// "tcp://host:port" or "env://". "env://" is resolved as follows:
///   1. LOCKSTEP_INIT_METHOD, if set, replaces env://. Its value must not be env://.
///   2. MASTER_ADDR and MASTER_PORT, as in PyTorch. LOCKSTEP_STORE_HOSTED=1 means that the launcher hosts the store
///      there.
///   3. Under torchrun (TORCHELASTIC_USE_AGENT_STORE=True), its agent already listens on MASTER_PORT. The port is
///      therefore derived from MASTER_PORT and TORCHELASTIC_RUN_ID.
///   4. Without MASTER_ADDR: the first host of Slurm's list (see Environment), else loopback if all ranks are on one
///      host. Without MASTER_PORT: a port derived from the job's name, else kDefaultPort.
/// Derived ports are from 20000 to 29999, and equal on all ranks.
///
/// If the variables are insufficient or invalid, throws a UsageError that names the variable and the remedy. A pure
/// function: reads variables only through `lookup`.
LOCKSTEP_EXPORT RendezvousPlace find_rendezvous(const std::string& init_method, const Environment& environment,
                                                const Environment::Lookup& lookup);

}  // namespace lockstep
