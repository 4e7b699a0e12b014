#pragma once

#include <string>
#include <vector>

#include <lockstep/process_group.h>

namespace lockstep {

/// Returns the strings of all ranks, in the order of ranks. The strings may differ in length. Collective.
std::vector<std::string> all_gather_strings(const ProcessGroup& group, const std::string& own,
                                            const CallOptions& options = {});

/// Returns the string of rank `root`. The strings of other ranks are ignored. Collective.
std::string broadcast_string(const ProcessGroup& group, const std::string& own, int root,
                             const CallOptions& options = {});

/// Returns the strings of all ranks on rank `root`, and an empty vector on other ranks. Collective.
std::vector<std::string> gather_strings(const ProcessGroup& group, const std::string& own, int root,
                                        const CallOptions& options = {});

/// Returns this rank's string of the strings that rank `root` passes, one for each rank. Collective.
std::string scatter_strings(const ProcessGroup& group, const std::vector<std::string>& all, int root,
                            const CallOptions& options = {});

/// Send and receive a string: two messages with this tag.
void send_string(const ProcessGroup& group, const std::string& content, int dst, uint32_t tag,
                 const CallOptions& options = {});
std::string recv_string(const ProcessGroup& group, int src, uint32_t tag, const CallOptions& options = {});

}  // namespace lockstep
