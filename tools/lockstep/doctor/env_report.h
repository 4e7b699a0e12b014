#pragma once

#include <string>

#include <nlohmann/json_fwd.hpp>

#include "doctor/machine.h"
#include "doctor/probe.h"
#include "doctor/variables.h"

namespace lockstep::tool {

/// All that a bug report needs, as it is printed.
nlohmann::ordered_json describe(const std::string& host, const Machine& machine, const Probe& probe,
                                const Variables& variables);

/// The same for people: sections of aligned lines.
std::string to_text(const nlohmann::ordered_json& report);

}  // namespace lockstep::tool
