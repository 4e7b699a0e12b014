#include "backends/mpi/communicators.h"

#include <atomic>
#include <bit>
#include <cstdlib>
#include <map>
#include <memory>
#include <vector>

#include <lockstep/error.h>

#include "backends/mpi/mpi_library.h"
#include "base/text.h"
#include "rendezvous/store/protocol.h"

namespace lockstep::mpi {
namespace {

/// Identifies this process among those of mpirun. Read before MPI_Init, because two processes with the same identity
/// must not both call MPI_Init.
struct RankIdentity {
  std::string job;
  int rank = 0;  // in MPI_COMM_WORLD
};

std::string first_of(std::initializer_list<const char*> variables) {
  for (const char* variable : variables)
    if (const char* value = std::getenv(variable); value && *value) return value;
  return "";
}

RankIdentity identify(const BackendContext& context) {
  RankIdentity result{first_of({"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "SLURM_STEP_ID"}), 0};
  int is_begun = 0, is_over = 0;
  MPI_Initialized(&is_begun);
  MPI_Finalized(&is_over);
  if (is_begun && !is_over) {
    check(MPI_Comm_rank(MPI_COMM_WORLD, &result.rank), "MPI_Comm_rank");
    return result;
  }
  const auto rank = first_of({"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"});
  if (rank.empty())
    throw UsageError(
        text("backend 'mpi' needs processes that MPI's launcher started, but this process was not; start the job with "
             "mpirun -n ",
             context.size, " PROGRAM, or use another backend"));
  result.rank = static_cast<int>(to_number(rank));
  return result;
}

/// The ranks' identities, exchanged through the store.
struct Identities {
  std::vector<int> world_ranks;  // rank in MPI_COMM_WORLD of each rank of the group
  int64_t number = 0;            // chosen by rank 0: different for each of its groups
};

Identities exchange_identities(const BackendContext& context) {
  static std::atomic<int64_t> groups{0};
  const RankIdentity own = identify(context);
  const auto identities =
      context.store->all_gather("mpi", context.rank, context.size,
                                pack({own.job, std::to_string(own.rank), std::to_string(groups++)}), context.timeout);
  Identities result;
  std::map<int, int> holders;  // world rank to group rank
  for (int rank = 0; rank < context.size; ++rank) {
    const auto fields = unpack(identities[rank]);
    const int world_rank = static_cast<int>(to_number(fields.at(1)));
    if (fields.at(0) != own.job)
      throw UsageError(text("rank ", rank, " was started by a different mpirun than rank ", context.rank, " (job '",
                            fields.at(0), "', not '", own.job, "'); start all ranks with one mpirun"));
    if (auto [holder, is_new] = holders.emplace(world_rank, rank); !is_new)
      throw UsageError(
          text("ranks ", holder->second, " and ", rank, " are both process ", world_rank,
               " of mpirun: a process that mpirun started has started several ranks; let mpirun start each rank"));
    if (rank == 0) result.number = to_number(fields.at(2));
    result.world_ranks.push_back(world_rank);
  }
  return result;
}

int most_tag() {
  int* value = nullptr;
  int is_set = 0;
  check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &value, &is_set), "MPI_Comm_get_attr");
  return is_set ? *value : 32767;  // the minimum that MPI guarantees
}

// Groups that are created at the same time need different tags. The tags are taken from the upper end of the range,
// where they are least likely to collide with tags that the program uses in MPI_COMM_WORLD.
int creation_tag(const Identities& ranks) {
  int world_size = 0;
  check(MPI_Comm_size(MPI_COMM_WORLD, &world_size), "MPI_Comm_size");
  const int64_t number = ranks.number * world_size + ranks.world_ranks.front();
  return static_cast<int>(most_tag() - number % (most_tag() / 2));
}

Communicators create_communicators(const Identities& ranks) {
  Communicators made;
  MPI_Group world = MPI_GROUP_NULL, members = MPI_GROUP_NULL;
  check(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
  check(MPI_Group_incl(world, static_cast<int>(ranks.world_ranks.size()), ranks.world_ranks.data(), &members),
        "MPI_Group_incl");
  check(MPI_Comm_create_group(MPI_COMM_WORLD, members, creation_tag(ranks), &made.collectives),
        "MPI_Comm_create_group");
  MPI_Group_free(&members);
  MPI_Group_free(&world);
  check(MPI_Comm_dup(made.collectives, &made.messages), "MPI_Comm_dup");
  for (MPI_Comm communicator : {made.collectives, made.messages})
    check(MPI_Comm_set_errhandler(communicator, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  made.tag_bits = std::bit_width(static_cast<unsigned>(most_tag()) + 1) - 1;
  return made;
}

}  // namespace

Communicators make_communicators(const BackendContext& context) {
  const auto ranks = exchange_identities(context);
  Library::of_process().begin(context);
  auto made = std::make_shared<Communicators>();  // shared with the thread, which may outlive this function
  await(run_detached("MPI_Comm_create_group", [=] { *made = create_communicators(ranks); }), context,
        "MPI_Comm_create_group", "it blocks until all ranks of the group call it");
  return *made;
}

void free(Communicators& communicators) noexcept {
  int is_over = 0;
  MPI_Finalized(&is_over);
  if (is_over) return;
  for (MPI_Comm* communicator : {&communicators.collectives, &communicators.messages})
    if (*communicator != MPI_COMM_NULL) MPI_Comm_free(communicator);
}

}  // namespace lockstep::mpi
