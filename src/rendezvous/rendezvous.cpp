#include "rendezvous/rendezvous.h"

#include <cstdint>
#include <limits>

#include <lockstep/error.h>

#include "base/text.h"
#include "base/variables.h"
#include "rendezvous/net/socket.h"

namespace lockstep {
namespace {

using Lookup = Environment::Lookup;

// Below 32768, where the ephemeral ports of Linux begin.
constexpr int kFirstDerivedPort = 20000;
constexpr int kDerivedPorts = 10000;

/// FNV-1a, because std::hash may differ between ranks.
int derive_port(const std::string& name) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char byte : name) hash = (hash ^ static_cast<uint8_t>(byte)) * 0x100000001b3;
  return kFirstDerivedPort + static_cast<int>(hash % kDerivedPorts);
}

std::string value_of(const Lookup& lookup, const std::string& variable) {
  return lookup(variable).value_or("");
}

/// Returns the part after "scheme://"; none for another scheme.
std::optional<std::string> after(const std::string& scheme, const std::string& place) {
  if (!place.starts_with(scheme)) return std::nullopt;
  return place.substr(scheme.size());
}

Endpoint read_endpoint(const std::string& written, const std::string& variable, const std::string& value,
                       const std::string& expected) {
  try {
    return parse_endpoint(written);
  } catch (const UsageError&) {
    refuse_value(variable, value, expected);
  }
}

RendezvousPlace read_place(const std::string& variable, const std::string& place, const std::string& expected) {
  if (auto path = after("file://", place); path && path->starts_with('/') && *path != "/") return RendezvousFile{*path};
  if (auto endpoint = after("tcp://", place))
    return RendezvousPort{read_endpoint(*endpoint, variable, place,
                                        "tcp://host:port with a port from 1 to 65535, like tcp://192.0.2.1:29500 or "
                                        "tcp://[2001:db8::1]:29500")};
  refuse_value(variable, place, expected);
}

bool launcher_hosts(const Environment& environment, const Lookup& lookup) {
  constexpr const char* kVariable = "LOCKSTEP_STORE_HOSTED";
  const auto value = lookup(kVariable);
  if (!value || *value == "0") return false;
  if (*value != "1") refuse_value(kVariable, *value, "1, when the launcher hosts the store, or 0");
  if (!environment.master_addr.empty() && environment.master_port != 0) return true;
  throw UsageError(text(kVariable, " is \"1\" but ", environment.master_addr.empty() ? "MASTER_ADDR" : "MASTER_PORT",
                        " is not set: the launcher that hosts the store must set both"));
}

std::string find_host(const Environment& environment) {
  if (!environment.master_addr.empty()) return environment.master_addr;
  if (environment.local_world_size == environment.world_size) return loopback_address();
  throw UsageError(text("MASTER_ADDR is not set, and of ", environment.world_size, " ranks only ",
                        environment.local_world_size,
                        " are on this host: set MASTER_ADDR to the name or address of rank 0's host, the same on all "
                        "ranks"));
}

int find_port(const Environment& environment, const Lookup& lookup, bool hosted) {
  const int given = environment.master_port;
  if (given == 0) return job_port(lookup);
  if (hosted || lookup("TORCHELASTIC_USE_AGENT_STORE") != "True") return given;
  // torchrun's agent listens at the given port.
  const int port = derive_port(text(given, " ", value_of(lookup, "TORCHELASTIC_RUN_ID")));
  if (port != given) return port;
  return port + 1 < kFirstDerivedPort + kDerivedPorts ? port + 1 : kFirstDerivedPort;
}

RendezvousPort read_environment(const Environment& environment, const Lookup& lookup) {
  const bool hosted = launcher_hosts(environment, lookup);
  const Endpoint place{find_host(environment), find_port(environment, lookup, hosted)};
  return {read_endpoint(to_string(place), "MASTER_ADDR", place.host,
                        "the name or address of rank 0's host, without a port"),
          !hosted};
}

}  // namespace

RendezvousPlace find_rendezvous(const std::string& init_method, const Environment& environment, const Lookup& lookup) {
  if (init_method != "env://") return read_place("init_method", init_method, "file:///path, tcp://host:port or env://");
  constexpr const char* kVariable = "LOCKSTEP_INIT_METHOD";
  if (const auto place = lookup(kVariable)) return read_place(kVariable, *place, "file:///path or tcp://host:port");
  return read_environment(environment, lookup);
}

std::string job_name(const Lookup& lookup) {
  // Slurm's variables come last: with mpirun in an allocation, the ranks on the first host do not have the step id of
  // the other ranks.
  for (const char* variable : {"LOCKSTEP_JOB_ID", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"})
    if (const auto name = value_of(lookup, variable); !name.empty()) return name;
  const auto job = value_of(lookup, "SLURM_JOB_ID");
  const auto step = value_of(lookup, "SLURM_STEP_ID");
  return job.empty() || step.empty() ? "" : text(job, ".", step);
}

int job_port(const Lookup& lookup) {
  const std::string job = job_name(lookup);
  return job.empty() ? kDefaultPort : derive_port(job);
}

int restart_count(const Lookup& lookup) {
  constexpr int kMost = std::numeric_limits<int>::max();
  for (const char* variable : {"LOCKSTEP_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"})
    if (const auto count = read_number(lookup, variable, 0, kMost)) return *count;
  return 0;
}

}  // namespace lockstep
