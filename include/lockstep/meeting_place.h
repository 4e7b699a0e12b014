#pragma once

#include <string>
#include <variant>

#include <lockstep/environment.h>
#include <lockstep/export.h>

namespace lockstep {

/// Where a socket is: a name or a numeric address, without brackets, and a port.
struct Endpoint {
  std::string host;
  int port = 0;

  bool operator==(const Endpoint&) const = default;
};

/// A file that all ranks can open.
struct MeetingFile {
  std::string path;

  bool operator==(const MeetingFile&) const = default;
};

/// A store that listens on a port.
struct MeetingPort {
  Endpoint endpoint;
  bool rank_zero_hosts = true;  ///< else the launcher does

  bool operator==(const MeetingPort&) const = default;
};

using MeetingPlace = std::variant<MeetingFile, MeetingPort>;

/// Where jobs meet that are told no port and have no name: PyTorch's.
inline constexpr int kDefaultPort = 29500;

/// Where init_process_group lets the ranks of a job meet. `init_method` is "file:///path", "tcp://host:port" or
/// "env://":
///   1. LOCKSTEP_INIT_METHOD, when set, stands for env:// (it may not say env:// again).
///   2. MASTER_ADDR and MASTER_PORT, as in PyTorch. LOCKSTEP_STORE_HOSTED=1 says that the launcher hosts the store
///      there.
///   3. Under torchrun (TORCHELASTIC_USE_AGENT_STORE=True) its agent already listens on MASTER_PORT: a port derived
///      from MASTER_PORT and TORCHELASTIC_RUN_ID, the same on all ranks.
///   4. Without MASTER_ADDR: the first host of Slurm's list (Environment has it), else loopback when all ranks share
///      one host. Without MASTER_PORT: one derived from the job's name, else kDefaultPort.
/// Derived ports lie in 20000 to 29999, and are the same for the same names on every rank.
/// UsageError, naming the variable and the remedy, when that is not enough. Pure: reads only what `lookup` answers.
LOCKSTEP_EXPORT MeetingPlace find_meeting_place(const std::string& init_method, const Environment& environment,
                                                const Environment::Lookup& lookup);

}  // namespace lockstep
