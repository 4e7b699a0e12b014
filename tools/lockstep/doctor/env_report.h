#pragma once

#include <map>
#include <string>

#include <nlohmann/json_fwd.hpp>

#include "doctor/machine.h"
#include "doctor/torch_probe.h"

namespace lockstep::tool {

using Variables = std::map<std::string, std::string>;

/// This process's.
Variables process_variables();

/// Of a process's variables those that decide how a job runs: lockstep's, the launchers', NCCL's, OpenMP's, the
/// loader's. The values of those that may hold a secret, going by their names, are replaced.
Variables relevant_variables(const Variables& all);

/// The telling ones that NCCL reads.
Variables nccl_variables(const Variables& all);

/// All that a bug report needs, as it is printed.
nlohmann::ordered_json describe(const std::string& host, const Machine& machine, const Probe& probe,
                                const Variables& variables);

/// The same for people: sections of aligned lines.
std::string to_text(const nlohmann::ordered_json& report);

}  // namespace lockstep::tool
