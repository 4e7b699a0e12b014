#pragma once

#include <string>

namespace lockstep {

/// Each writes one line to the library's log (destination: lockstep/logging.h). Thread-safe. The message is printed
/// unchanged, including braces. It should say what the reader can do; conditions that require an action are exceptions.
void log_debug(const std::string& message);
void log_info(const std::string& message);
void log_warning(const std::string& message);
void log_error(const std::string& message);

/// Like log_warning, for threads that must not block: a stopped terminal blocks its writers. A background thread writes
/// the line; process exit waits for it, for up to 2 s. Drops lines while 100 lines wait.
void log_warning_async(std::string message);

}  // namespace lockstep
