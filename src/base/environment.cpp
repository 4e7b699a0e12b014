#include <lockstep/environment.h>

#include <cstdint>
#include <limits>

#include <lockstep/error.h>

#include "base/text.h"
#include "base/variables.h"

namespace lockstep {
namespace {

using Lookup = Environment::Lookup;

constexpr int kMost = std::numeric_limits<int>::max();

struct Launcher {
  const char* source;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
};

constexpr Launcher kTorchrun{"torchrun variables", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr Launcher kOpenMpi{"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                            "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr Launcher kPmi{"MPICH/PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"};

struct RankPlace {
  int rank;
  int size;
};

[[noreturn]] void refuse_unset(const std::string& variable, const std::string& because) {
  throw UsageError(text(variable, " is not set but ", because,
                        " is: let the launcher set all of its variables, or set ",
                        "RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE"));
}

int require_slurm_number(const Lookup& lookup, const std::string& variable) {
  if (auto number = read_number(lookup, variable, 0, kMost)) return *number;
  refuse_unset(variable, "SLURM_PROCID");
}

RankPlace checked(const std::string& rank_variable, int rank, const std::string& size_variable, int size) {
  if (rank < size) return {rank, size};
  const std::string range = size == 1 ? "0" : text("0 to ", size - 1);
  throw UsageError(text(rank_variable, " is \"", rank, "\" but ", size_variable, " is ", size,
                        ": ranks count from 0, so ", rank_variable, " must be ", range));
}

/// Reads rank and size; both or neither must be set.
std::optional<RankPlace> read_rank_place(const Lookup& lookup, const std::string& rank_variable,
                                         const std::string& size_variable) {
  auto rank = read_number(lookup, rank_variable, 0, kMost);
  auto size = read_number(lookup, size_variable, 1, kMost);
  if (!rank && !size) return std::nullopt;
  if (!rank) throw UsageError(text(size_variable, " is \"", *size, "\" but ", rank_variable, " is not set: set both"));
  if (!size) throw UsageError(text(rank_variable, " is \"", *rank, "\" but ", size_variable, " is not set: set both"));
  return checked(rank_variable, *rank, size_variable, *size);
}

bool read_world(const Lookup& lookup, const Launcher& launcher, Environment& found) {
  auto world = read_rank_place(lookup, launcher.rank, launcher.size);
  if (!world) return false;
  found.rank = world->rank;
  found.world_size = world->size;
  found.source = launcher.source;
  return true;
}

void set_local(Environment& found, RankPlace local, const std::string& local_size_variable,
               const std::string& size_variable) {
  if (local.size > found.world_size)
    throw UsageError(text(local_size_variable, " is ", local.size, " but ", size_variable, " is ", found.world_size,
                          ": a host cannot have more ranks than the job, so ", local_size_variable, " must be 1 to ",
                          found.world_size));
  found.local_rank = local.rank;
  found.local_world_size = local.size;
}

bool only_this_host_reaches(const std::string& address) {
  return address.empty() || address == "localhost" || address == "::1" || address == "[::1]" ||
         address.starts_with("127.");
}

void read_torchrun_local(const Lookup& lookup, Environment& found) {
  const bool one_host = only_this_host_reaches(found.master_addr);
  const bool has_rank = lookup(kTorchrun.local_rank).has_value();
  const bool has_size = lookup(kTorchrun.local_size).has_value();
  if (has_size || (has_rank && !one_host)) {
    auto local = read_rank_place(lookup, kTorchrun.local_rank, kTorchrun.local_size);
    return set_local(found, *local, kTorchrun.local_size, kTorchrun.size);
  }
  found.local_assumed = true;
  if (!one_host) return;  // one rank per host: 0 of 1
  const int local_rank = read_number(lookup, kTorchrun.local_rank, 0, kMost).value_or(found.rank);
  found.local_rank = checked(kTorchrun.local_rank, local_rank, kTorchrun.size, found.world_size).rank;
  found.local_world_size = found.world_size;
}

void read_mpi_local(const Lookup& lookup, const Launcher& launcher, Environment& found) {
  auto local = read_rank_place(lookup, launcher.local_rank, launcher.local_size);
  if (!local && found.world_size == 1) return;
  if (!local) refuse_unset(launcher.local_rank, launcher.rank);
  set_local(found, *local, launcher.local_size, launcher.size);
}

/// Returns none outside of srun's tasks: sbatch and salloc also set SLURM_PROCID and SLURM_NTASKS, for a script that is
/// not a rank.
std::optional<std::string> slurm_size_variable(const Lookup& lookup) {
  constexpr int64_t kFirstReservedStep = 0xfffffff0;  // batch scripts, interactive shells
  auto step = lookup("SLURM_STEP_ID");
  if (step && parse_number<int64_t>(*step).value_or(0) >= kFirstReservedStep) return std::nullopt;
  if (lookup("SLURM_STEP_NUM_TASKS")) return "SLURM_STEP_NUM_TASKS";
  if (step && lookup("SLURM_PROCID") && lookup("SLURM_NTASKS")) return "SLURM_NTASKS";
  return std::nullopt;
}

/// srun sets PMI variables in addition to Slurm's own, which also have the local ranks and the hosts.
bool srun_speaks_pmi(const Lookup& lookup) {
  return slurm_size_variable(lookup) && !lookup(kPmi.local_rank) && !lookup(kPmi.local_size) &&
         lookup(kPmi.rank) == lookup("SLURM_PROCID");
}

bool take_token(std::string_view& list, std::string_view token) {
  if (!list.starts_with(token)) return false;
  list.remove_prefix(token.size());
  return true;
}

std::optional<int> take_count(std::string_view& list) {
  auto digits = list.substr(0, list.find_first_not_of("0123456789"));
  list.remove_prefix(digits.size());
  auto count = parse_number<int>(digits);
  return count && *count > 0 ? count : std::nullopt;
}

/// Returns the entry of `node` in Slurm's list of tasks per node; "2(x3),1" means two on each of three nodes, then one.
std::optional<int> tasks_at(std::string_view list, int64_t node) {
  std::optional<int> found;
  do {
    auto tasks = take_count(list);
    std::optional<int> nodes = 1;
    if (take_token(list, "(x")) {
      nodes = take_count(list);
      if (!take_token(list, ")")) return std::nullopt;
    }
    if (!tasks || !nodes) return std::nullopt;
    if (node >= 0 && node < *nodes) found = tasks;
    node -= *nodes;
  } while (take_token(list, ","));
  return list.empty() ? found : std::nullopt;
}

/// Returns "node01" for "node[01-03,07],other".
std::optional<std::string> first_host(std::string_view list) {
  std::string host;
  while (!list.empty() && list.front() != ',') {
    auto name = list.substr(0, list.find_first_of("[,"));
    host += name;
    list.remove_prefix(name.size());
    if (!take_token(list, "[")) continue;
    auto first = list.substr(0, list.find_first_of("-,]"));
    auto end = list.find(']');
    if (first.empty() || end == list.npos) return std::nullopt;
    host += first;
    list.remove_prefix(end + 1);
  }
  if (host.empty() || host.find_first_of("[] ") != host.npos) return std::nullopt;
  return host;
}

void read_slurm_local(const Lookup& lookup, const std::string& size_variable, Environment& found) {
  const char* variable = lookup("SLURM_STEP_TASKS_PER_NODE") ? "SLURM_STEP_TASKS_PER_NODE" : "SLURM_TASKS_PER_NODE";
  const int node = require_slurm_number(lookup, "SLURM_NODEID");
  const int local_rank = require_slurm_number(lookup, "SLURM_LOCALID");
  auto list = lookup(variable);
  if (!list) refuse_unset(variable, "SLURM_PROCID");
  auto tasks = tasks_at(*list, node);
  if (!tasks)
    refuse_value(variable, *list,
                 text("the tasks of every node, like \"2(x3),1\", with an entry for SLURM_NODEID ", node));
  const std::string entry = text(variable, " for node ", node);
  set_local(found, checked("SLURM_LOCALID", local_rank, entry, *tasks), entry, size_variable);
}

void read_slurm_address(const Lookup& lookup, Environment& found) {
  if (!found.master_addr.empty()) return;
  const char* variable = lookup("SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST";
  auto list = lookup(variable);
  if (!list) return;
  auto host = first_host(*list);
  if (!host) refuse_value(variable, *list, "a list of hosts, like \"node[01-03,07],other\"; or set MASTER_ADDR");
  found.master_addr = *host;
}

void read_slurm(const Lookup& lookup, Environment& found) {
  auto size_variable = slurm_size_variable(lookup);
  if (!size_variable) return;
  const Launcher slurm{"Slurm", "SLURM_PROCID", size_variable->c_str(), "", ""};
  read_world(lookup, slurm, found);
  read_slurm_local(lookup, *size_variable, found);
  read_slurm_address(lookup, found);
}

}  // namespace

Environment Environment::detect() {
  return detect(process_variable);
}

Environment Environment::detect(const Lookup& lookup) {
  Environment found;
  if (auto address = lookup("MASTER_ADDR")) {
    if (address->empty()) refuse_value("MASTER_ADDR", *address, "the name or address of rank 0's host");
    found.master_addr = *address;
  }
  found.master_port = read_number(lookup, "MASTER_PORT", 1, 65535).value_or(0);

  if (read_world(lookup, kTorchrun, found)) {
    read_torchrun_local(lookup, found);
  } else if (read_world(lookup, kOpenMpi, found)) {
    read_mpi_local(lookup, kOpenMpi, found);
  } else if (!srun_speaks_pmi(lookup) && read_world(lookup, kPmi, found)) {
    read_mpi_local(lookup, kPmi, found);
  } else {
    read_slurm(lookup, found);
  }
  return found;
}

}  // namespace lockstep
