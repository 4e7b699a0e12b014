#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

/// Identifies a process to the other processes of its job.
struct ProcessId {
  std::string host;     // host name, for messages
  std::string host_id;  // equal if and only if the host is: LOCKSTEP_HOST_ID, else the kernel's boot id
  int64_t pid = 0;

  bool operator==(const ProcessId&) const = default;
};

/// This process.
ProcessId this_process();

/// "pid 4711 on node3".
std::string describe(const ProcessId& process);

/// Returns whether a debugger is attached to the process. False for processes of other hosts.
bool is_traced(const ProcessId& process);

/// The same for this process. Does not read the environment, so any thread may call it at any time.
bool is_this_process_traced();

}  // namespace lockstep
