#include "rendezvous/host.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "base/text.h"

namespace lockstep {
namespace {

std::string host_name() {
  char name[256] = {};
  if (::gethostname(name, sizeof name - 1) != 0) return "unknown-host";
  return name;
}

std::string host_id() {
  if (const char* set = std::getenv("LOCKSTEP_HOST_ID"); set && *set) return set;
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id.empty() ? host_name() : id;
}

}  // namespace

ProcessId this_process() {
  return {host_name(), host_id(), ::getpid()};
}

std::string describe(const ProcessId& process) {
  return text("pid ", process.pid, " on ", process.host);
}

bool is_traced(const ProcessId& process) {
  if (process.host_id != host_id()) return false;
  std::ifstream status(text("/proc/", process.pid, "/status"));
  for (std::string word; status >> word;)
    if (word == "TracerPid:") {
      int64_t tracer = 0;
      return status >> tracer && tracer != 0;
    }
  return false;
}

}  // namespace lockstep
