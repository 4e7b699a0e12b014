#pragma once

#include <string>
#include <vector>

#include <lockstep/process_group.h>

namespace lockstep {

/// Every rank's string, in order of rank. Collective; the strings may differ in length.
std::vector<std::string> all_gather_strings(const ProcessGroup& group, const std::string& mine);

/// The string of rank `root`. Collective; what the other ranks give is not looked at.
std::string broadcast_string(const ProcessGroup& group, const std::string& mine, int root);

}  // namespace lockstep
