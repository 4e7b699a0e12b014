#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include <lockstep/export.h>

namespace lockstep {

/// This process's rank and the job's size, as set by the launcher. A plain value.
///
/// All values come from the first of these sources that is set; sources are not mixed:
///   1. RANK and WORLD_SIZE, with LOCAL_RANK and LOCAL_WORLD_SIZE: lockstep run, torchrun, or set by hand.
///   2. Open MPI: OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE.
///   3. MPICH, Intel MPI: PMI_RANK, PMI_SIZE, MPI_LOCALRANKID and MPI_LOCALNRANKS.
///   4. Slurm: a task of an srun step. An sbatch script or an salloc shell is not a task but a single process. PMI
///      variables that srun itself sets count as Slurm, because Slurm also knows the hosts.
///   5. None: a single process, rank 0 of 1.
/// MASTER_ADDR and MASTER_PORT are read with every source, and override the address from Slurm.
///
/// RANK and WORLD_SIZE are sufficient, as in PyTorch. If LOCAL_RANK and LOCAL_WORLD_SIZE are missing, they are assumed
/// and `local_assumed` is set. If MASTER_ADDR is unset or a loopback address, which no other host could reach, all
/// ranks are assumed to be on one host. With any other MASTER_ADDR, one rank per host is assumed, as in a manual start
/// on two machines or in Kubernetes. LOCAL_RANK without LOCAL_WORLD_SIZE is accepted only if all ranks are assumed to
/// be on one host; in all other cases, setting only one of the two is a UsageError, because ranks could assume
/// different values.
struct LOCKSTEP_EXPORT Environment {
  static constexpr std::string_view kSingleProcess = "single process";

  int rank = 0;                        ///< 0 to world_size - 1
  int world_size = 1;                  ///< 1 or more
  int local_rank = 0;                  ///< among the ranks on this host: 0 to local_world_size - 1
  int local_world_size = 1;            ///< ranks on this host: 1 to world_size
  bool local_assumed = false;          ///< local_* were assumed, see above; ProcessGroup::local_rank() is exact
  std::string master_addr;             ///< name or address of rank 0's host; empty if not set
  int master_port = 0;                 ///< 1 to 65535; 0 if not set
  std::string source{kSingleProcess};  ///< for messages: "torchrun variables", "Open MPI", "MPICH/PMI", "Slurm"

  /// Returns the value of a variable, or nullopt if it is not set. An empty value counts as set.
  using Lookup = std::function<std::optional<std::string>(const std::string& variable)>;

  /// Reads this process's environment. Not collective. Thread-safe as long as no thread changes the environment. If a
  /// set of variables is incomplete or a value is invalid, throws a UsageError that names the variable, its value and
  /// the remedy.
  static Environment detect();

  /// Like detect(), but reads variables only through `lookup`.
  static Environment detect(const Lookup& lookup);

  bool operator==(const Environment& other) const = default;
};

}  // namespace lockstep
