#pragma once

#include <string>

#include "cli/manual.h"

namespace lockstep::tool {

/// The output of `--help`, wrapped to `columns`, except for lines that the manual keeps verbatim.
std::string help_text(const Manual& manual, int columns);

/// "lockstep run [OPTIONS] PROGRAM [ARGUMENT...]".
std::string usage(const Manual& manual);

/// The text after an option's name: " N", " [STREAMS]", " RANK..."; empty for a flag.
std::string value_text(const Value& value);

/// The width for help: that of the terminal, but at most 100; 80 without a terminal.
int help_columns();

}  // namespace lockstep::tool
