#pragma once

#include <string>
#include <vector>

namespace lockstep::detail {

/// What backend "auto" stands for: the names to try, best first, for ranks on these hosts (one entry for each rank).
///
/// Shared memory on one host; on several the hierarchy of both, or Gloo alone when each has one rank. Gloo also where
/// ranks of one host turn out not to see each other's memory. UsageError, naming what to install, when there is none.
std::vector<std::string> choose_backends(const std::vector<std::string>& host_of_rank,
                                         const std::vector<std::string>& available);

}  // namespace lockstep::detail
