#pragma once

#include <sched.h>

#include <vector>

namespace lockstep::bench {

/// The cores of `rank` if `ranks` ranks divide `cores` evenly, without overlap. Empty if there are fewer cores than
/// ranks. Pure.
std::vector<int> cores_of_rank(const std::vector<int>& cores, int rank, int ranks);

/// The affinity mask of the calling thread.
std::vector<int> allowed_cores();

/// Pins the constructing thread, and threads it starts, to the cores of the rank while it exists. Backend threads
/// started earlier are not pinned: on one core, a backend thread and the thread that waits for it would block each
/// other. Throws SystemError on failure.
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
