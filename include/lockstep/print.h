#pragma once

#include <locale>
#include <sstream>
#include <string>

#include <lockstep/export.h>
#include <lockstep/process_group.h>

namespace lockstep {

namespace detail {
/// Writes a line, and a line break, to standard output in one piece, after the program's earlier output.
LOCKSTEP_EXPORT void print_line(std::string line);
}  // namespace detail

/// Prints a line on rank 0 of the group: `print(world, "epoch ", epoch, ", loss ", loss)`. The other ranks do nothing.
/// Not collective. The parts are written as by operator<<, manipulators such as std::setprecision(3) included; a line
/// break follows.
///
/// While a Progress shows a live line, the printed line appears above it.
///
/// The line is written to standard output at once and in one piece, so lines of several processes or threads do not
/// mix, in a pipe up to 4096 bytes. Like std::cout, it ignores errors, for example a closed pipe. Thread-safe.
template <class... Parts>
void print(const ProcessGroup& group, const Parts&... parts) {
  if (group.rank() != 0) return;
  std::ostringstream line;
  line.imbue(std::locale::classic());
  (line << ... << parts);
  detail::print_line(line.str());
}

}  // namespace lockstep
