#pragma once

#include <functional>
#include <string>

#include <lockstep/export.h>

namespace lockstep {

/// In rising order: a level shows its own lines and those above it. kOff shows none.
enum class LogLevel { kDebug, kInfo, kWarning, kError, kOff };

/// The log belongs to the process: one level and one sink, for all groups. Every function here may be called from any
/// thread at any time. None is collective.

/// The level at the start is LOCKSTEP_LOG, one of debug, info, warning, error and off; kWarning where it is not set.
/// A call wins over the variable.
LOCKSTEP_EXPORT void set_log_level(LogLevel level);
LOCKSTEP_EXPORT LogLevel log_level();

/// Sends lines to `sink`, without prefix or line end, instead of stderr; an empty function restores stderr, where a
/// line reads "[lockstep rank 2] warning: ..." (without the rank where no launcher gave one).
///
/// The sink is called on the thread that logs, for one line at a time, and never again once it has been replaced. So do
/// not hold, while you call lockstep, a lock that the sink takes. What it throws is dropped and the line goes to
/// stderr.
LOCKSTEP_EXPORT void set_log_sink(std::function<void(LogLevel level, const std::string& message)> sink);

}  // namespace lockstep
