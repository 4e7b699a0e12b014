#include "ranks/test_ranks.h"

#include <map>

namespace {

using TestRank = int (*)(const std::vector<std::string>& arguments);

const std::map<std::string, TestRank> kTestRanks{
    {"attacked_rank", run_attacked_rank},
    {"hosts_rank", run_hosts_rank},
    {"leaving_rank", run_leaving_rank},
#ifdef LOCKSTEP_HAVE_MPI
    {"mpi_rank", run_mpi_rank},
#endif
    {"progress_program", run_progress_program},
    {"resuming_rank", run_resuming_rank},
    {"running_rank", run_running_rank},
    {"shared_rank", run_shared_rank},
    {"spawning", run_spawning},
};

}  // namespace

int run_test_rank(const std::vector<std::string>& words) {
  return kTestRanks.at(words.at(0))({words.begin() + 1, words.end()});
}
