#pragma once

#include <vector>

namespace lockstep::bench {

/// The cores that are `rank`'s when `ranks` share these: as many for each, none for two. Empty when there are fewer
/// cores than ranks. Pure.
std::vector<int> share_of(const std::vector<int>& cores, int rank, int ranks);

/// Keeps the calling thread, and those that it starts from now on, on its share of the cores of this process. Threads
/// that backends have started before stay free: on one core with the thread that they work for, each would wait for the
/// other. SystemError when the system refuses.
void pin_this_thread(int rank, int ranks);

}  // namespace lockstep::bench
