#include "bench/ranks/pinning.h"

#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include <lockstep/error.h>

namespace lockstep::bench {
namespace {

cpu_set_t affinity() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (::sched_getaffinity(0, sizeof cores, &cores) != 0)
    throw SystemError(fmt::format("sched_getaffinity: {}", std::strerror(errno)));
  return cores;
}

}  // namespace

std::vector<int> cores_of_rank(const std::vector<int>& cores, int rank, int ranks) {
  const size_t each = cores.size() / static_cast<size_t>(ranks);
  const auto first = cores.begin() + static_cast<ptrdiff_t>(each) * rank;
  return {first, first + static_cast<ptrdiff_t>(each)};
}

std::vector<int> allowed_cores() {
  const cpu_set_t allowed = affinity();
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &allowed)) cores.push_back(core);
  return cores;
}

Pinning::Pinning(int rank, int ranks) : before_(affinity()) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  for (int core : cores_of_rank(allowed_cores(), rank, ranks)) CPU_SET(core, &mask);
  if (::sched_setaffinity(0, sizeof mask, &mask) != 0)
    throw SystemError(fmt::format("cannot pin rank {} to its cores: {}", rank, std::strerror(errno)));
}

Pinning::~Pinning() {
  ::sched_setaffinity(0, sizeof before_, &before_);
}

}  // namespace lockstep::bench
