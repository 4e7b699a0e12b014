#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

/// A process, as the others of its job know it.
struct ProcessId {
  std::string host;     // its name, for people
  std::string host_id;  // equal exactly for processes of one host: LOCKSTEP_HOST_ID, else the kernel's boot id
  int64_t pid = 0;

  bool operator==(const ProcessId&) const = default;
};

/// This process.
ProcessId this_process();

/// "pid 4711 on node3".
std::string describe(const ProcessId& process);

/// Whether a debugger holds the process. Only processes of this host can be seen: false for others.
bool is_traced(const ProcessId& process);

/// The same of this process. Reads no environment: from any thread at any time.
bool is_this_process_traced();

}  // namespace lockstep
