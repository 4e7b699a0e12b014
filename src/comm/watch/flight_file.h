#pragma once

#include <string>

namespace lockstep::detail {

/// Writes a new file of a rank's flight recorder into LOCKSTEP_FLIGHT_DIR, or else into a folder of this user's in
/// TMPDIR or /tmp, where only the newest files are kept. Other users may write to those places: no file of theirs is
/// opened, and none can block the rank. Returns the path; throws Error when it cannot be written.
std::string write_flight_file(int rank, const std::string& content);

}  // namespace lockstep::detail
