#include "pinning.h"

#include <sched.h>

#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include <lockstep/error.h>

namespace lockstep::bench {

std::vector<int> share_of(const std::vector<int>& cores, int rank, int ranks) {
  const size_t each = cores.size() / static_cast<size_t>(ranks);
  const auto first = cores.begin() + static_cast<ptrdiff_t>(each) * rank;
  return {first, first + static_cast<ptrdiff_t>(each)};
}

void pin_this_thread(int rank, int ranks) {
  cpu_set_t allowed, mine;
  CPU_ZERO(&allowed);
  CPU_ZERO(&mine);
  bool is_done = ::sched_getaffinity(0, sizeof allowed, &allowed) == 0;
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &allowed)) cores.push_back(core);
  for (int core : share_of(cores, rank, ranks)) CPU_SET(core, &mine);
  is_done = is_done && ::sched_setaffinity(0, sizeof mine, &mine) == 0;
  if (!is_done) throw SystemError(fmt::format("rank {} cannot be pinned to its cores: {}", rank, std::strerror(errno)));
}

}  // namespace lockstep::bench
