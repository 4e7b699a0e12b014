#pragma once

#include <string>

namespace lockstep {

/// One line of the library's log each; see lockstep/logging.h for where it goes. From any thread. The message is
/// printed as it is, braces included, and says what a reader can do; what they must do is an exception instead.
void log_debug(const std::string& message);
void log_info(const std::string& message);
void log_warning(const std::string& message);
void log_error(const std::string& message);

}  // namespace lockstep
