#pragma once

#include <map>
#include <string>

namespace lockstep::tool {

using Variables = std::map<std::string, std::string>;

/// This process's.
Variables process_variables();

/// Of a process's variables those that decide how a job runs: lockstep's, the launchers', NCCL's, OpenMP's, the
/// loader's. The values of those that may hold a secret, going by their names, are replaced.
Variables telling_variables(const Variables& all);

/// The telling ones that NCCL reads.
Variables nccl_variables(const Variables& all);

}  // namespace lockstep::tool
