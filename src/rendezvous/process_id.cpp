#include "rendezvous/process_id.h"

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

bool has_tracer(const std::string& status_file) {
  std::ifstream status(status_file);
  for (std::string word; status >> word;)
    if (word == "TracerPid:") {
      int64_t tracer = 0;
      return status >> tracer && tracer != 0;
    }
  return false;
}

}  // namespace

ProcessId this_process() {
  return {host_name(), host_id(), ::getpid()};
}

std::string describe(const ProcessId& process) {
  return text("pid ", process.pid, " on ", process.host);
}

bool is_traced(const ProcessId& process) {
  return process.host_id == host_id() && has_tracer(text("/proc/", process.pid, "/status"));
}

bool is_this_process_traced() {
  return has_tracer("/proc/self/status");
}

}  // namespace lockstep
