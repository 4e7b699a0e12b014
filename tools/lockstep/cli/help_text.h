#pragma once

#include <string>

#include "cli/manual.h"

namespace lockstep::tool {

/// What `--help` prints, in lines of at most `columns` but for what the manual has in longer ones.
std::string help_text(const Manual& manual, int columns);

/// "lockstep run [OPTIONS] PROGRAM [ARGUMENT...]".
std::string usage(const Manual& manual);

/// What follows an option's name: " N", " [STREAMS]", " RANK..."; empty for a flag.
std::string value_text(const Value& value);

/// For help: as wide as the terminal, up to what is pleasant to read; 80 without a terminal.
int help_columns();

}  // namespace lockstep::tool
