#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include <lockstep/export.h>

namespace lockstep {

/// Which rank this process is, as its launcher says. A plain value: copy it, change it, no thread owns it.
///
/// The first source that is set decides, and no other is mixed in:
///   1. RANK and WORLD_SIZE, with LOCAL_RANK and LOCAL_WORLD_SIZE: lockstep run, torchrun, or set by hand.
///   2. Open MPI: OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE.
///   3. MPICH, Intel MPI: PMI_RANK, PMI_SIZE, MPI_LOCALRANKID and MPI_LOCALNRANKS.
///   4. Slurm: a task of an srun step. An sbatch script and an salloc shell are no tasks: they are single processes.
///      The PMI variables that srun itself sets count as Slurm, which also knows the hosts.
///   5. None: one process, rank 0 of 1.
/// MASTER_ADDR and MASTER_PORT count under every source, and win over the address that Slurm gives.
///
/// RANK and WORLD_SIZE are enough, as in PyTorch. Without LOCAL_RANK and LOCAL_WORLD_SIZE, all ranks are taken to share
/// one host where MASTER_ADDR is not set or is loopback, since no other host could reach it; any other MASTER_ADDR is
/// taken to mean one rank per host, as by hand on two machines or in Kubernetes. `local_assumed` tells. LOCAL_RANK
/// alone is accepted where all ranks share one host; elsewhere half the pair is refused, since ranks would guess
/// differently.
struct LOCKSTEP_EXPORT Environment {
  static constexpr std::string_view kSingleProcess = "single process";

  int rank = 0;                        ///< 0 to world_size - 1
  int world_size = 1;                  ///< 1 or more
  int local_rank = 0;                  ///< among the ranks of this host: 0 to local_world_size - 1
  int local_world_size = 1;            ///< ranks on this host: 1 to world_size
  bool local_assumed = false;          ///< the two above were not both given: a count of the hosts knows better
  std::string master_addr;             ///< where rank 0 is, a name or an address; empty: not given
  int master_port = 0;                 ///< 1 to 65535; 0: not given
  std::string source{kSingleProcess};  ///< for people: "torchrun variables", "Open MPI", "MPICH/PMI", "Slurm"

  /// The value of a variable, none when it is not set. An empty value is a value.
  using Lookup = std::function<std::optional<std::string>(const std::string& variable)>;

  /// Reads this process's environment. Not collective; from any thread, as long as no other changes the environment.
  /// Throws UsageError, naming the variable, its value and the remedy, when a set is partial or a value senseless.
  static Environment detect();

  /// The same with the variables that `lookup` answers. Reads nothing else.
  static Environment detect(const Lookup& lookup);

  bool operator==(const Environment& other) const = default;
};

}  // namespace lockstep
