#pragma once

#include <map>
#include <string>

#include <nlohmann/json_fwd.hpp>

#include "doctor/machine.h"
#include "doctor/torch_probe.h"

namespace lockstep::tool {

using Variables = std::map<std::string, std::string>;

/// The environment of this process.
Variables process_variables();

/// The variables that affect how a job runs: those of lockstep, launchers, NCCL, OpenMP and the dynamic loader. Values
/// of variables whose names suggest a secret are replaced by "(hidden)".
Variables relevant_variables(const Variables& all);

/// The relevant variables that NCCL reads.
Variables nccl_variables(const Variables& all);

/// The report of `lockstep env`, as JSON.
nlohmann::ordered_json describe(const std::string& host, const Machine& machine, const Probe& probe,
                                const Variables& variables);

/// The report as text: sections of aligned lines.
std::string to_text(const nlohmann::ordered_json& report);

}  // namespace lockstep::tool
