#pragma once

#include <sched.h>

#include <vector>

namespace lockstep::bench {

/// The cores that are `rank`'s when `ranks` share these: as many for each, none for two. Empty when there are fewer
/// cores than ranks. Pure.
std::vector<int> cores_of_rank(const std::vector<int>& cores, int rank, int ranks);

/// The cores that the calling thread may run on.
std::vector<int> allowed_cores();

/// While it lives, the thread that made it, and those that it starts, stay on its share of the cores. Threads that
/// backends have started before stay free: on one core with the thread that they work for, each would wait for the
/// other. SystemError when the system refuses.
class Pinning {
 public:
  Pinning(int rank, int ranks);
  ~Pinning();
  Pinning(const Pinning&) = delete;
  Pinning& operator=(const Pinning&) = delete;

 private:
  cpu_set_t before_;  // constant after construction
};

}  // namespace lockstep::bench
