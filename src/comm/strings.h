#pragma once

#include <string>
#include <vector>

#include <lockstep/process_group.h>

namespace lockstep {

/// Every rank's string, in order of rank. Collective; the strings may differ in length.
std::vector<std::string> all_gather_strings(const ProcessGroup& group, const std::string& mine,
                                            const CallOptions& options = {});

/// The string of rank `root`. Collective; what the other ranks give is not looked at.
std::string broadcast_string(const ProcessGroup& group, const std::string& mine, int root,
                             const CallOptions& options = {});

/// Every rank's string on rank `root`, none on the others. Collective.
std::vector<std::string> gather_strings(const ProcessGroup& group, const std::string& mine, int root,
                                        const CallOptions& options = {});

/// This rank's of the strings that rank `root` gives, one for each rank. Collective.
std::string scatter_strings(const ProcessGroup& group, const std::vector<std::string>& all, int root,
                            const CallOptions& options = {});

}  // namespace lockstep
