#pragma once

#include <functional>
#include <string>

#include <lockstep/export.h>

namespace lockstep {

/// In increasing order. At each level, lines of that level and of all higher levels are logged. kOff: none.
enum class LogLevel { kDebug, kInfo, kWarning, kError, kOff };

/// The log belongs to the process: all groups share one level and one sink. All functions in this file are thread-safe
/// and not collective.

/// Set and return the log level. The initial level is the value of LOCKSTEP_LOG (debug, info, warning, error or off),
/// or kWarning if the variable is not set or invalid. set_log_level overrides the variable.
LOCKSTEP_EXPORT void set_log_level(LogLevel level);
LOCKSTEP_EXPORT LogLevel log_level();

/// Sends log lines to `sink` instead of stderr. An empty function restores stderr. The sink gets lines without prefix
/// and line break; on stderr a line reads "[lockstep rank 2] warning: ...", without the rank if no launcher has set
/// one.
///
/// The sink is called on the thread that logs, for one line at a time, and never after it was replaced. Do not hold a
/// lock that the sink takes while you call lockstep. If the sink throws, the exception is dropped and the line is
/// written to stderr.
LOCKSTEP_EXPORT void set_log_sink(std::function<void(LogLevel level, const std::string& message)> sink);

}  // namespace lockstep
