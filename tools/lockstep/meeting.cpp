#include "meeting.h"

#include <fmt/format.h>

#include <lockstep/error.h>

#include "files.h"

namespace lockstep::tool {
namespace {

constexpr int kDefaultPort = 29500;

std::string without_brackets(const std::string& host) {
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') return host.substr(1, host.size() - 2);
  return host;
}

Meeting refuse(Meeting meeting, const std::string& refusal) {
  meeting.kind = Meeting::Kind::kUnknown;
  meeting.refusal = refusal;
  return meeting;
}

Meeting meet_by_method(Meeting meeting, const std::string& method) {
  const std::string variable = "LOCKSTEP_INIT_METHOD";
  if (method.starts_with("file:///") && method.size() > 8) {
    meeting.kind = Meeting::Kind::kFile;
    meeting.file = method.substr(7);
    return meeting;
  }
  const auto colon = method.rfind(':');
  if (method.starts_with("tcp://") && colon != std::string::npos && colon > 6) {
    const auto port = to_integer(method.substr(colon + 1));
    meeting.host = without_brackets(method.substr(6, colon - 6));
    meeting.host_source = meeting.port_source = variable;
    meeting.port = static_cast<int>(port.value_or(0));
    if (port && *port >= 1 && *port <= 65535) return meeting;
  }
  return refuse(meeting, fmt::format("{} is \"{}\": it should be tcp://host:port or file:///path", variable, method));
}

bool has_job_name(const Environment::Lookup& lookup) {
  for (const char* variable : {"LOCKSTEP_JOB_ID", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"})
    if (!lookup(variable).value_or("").empty()) return true;
  return !lookup("SLURM_JOB_ID").value_or("").empty() && !lookup("SLURM_STEP_ID").value_or("").empty();
}

}  // namespace

Meeting find_meeting(const Environment::Lookup& lookup) {
  Meeting meeting;
  try {
    meeting.job = Environment::detect(lookup);
  } catch (const Error& error) {
    return refuse(meeting, error.what());
  }
  if (const auto method = lookup("LOCKSTEP_INIT_METHOD")) return meet_by_method(meeting, *method);

  const auto& job = meeting.job;
  if (!job.master_addr.empty()) {
    meeting.host = without_brackets(job.master_addr);
    meeting.host_source = lookup("MASTER_ADDR") ? "MASTER_ADDR" : job.source;
  } else if (spans_hosts(meeting)) {
    return refuse(meeting, fmt::format("MASTER_ADDR is not set, and of {} ranks only {} are on this host: it should be "
                                       "the name or address of rank 0's host",
                                       job.world_size, job.local_world_size));
  }
  if (job.master_port != 0) {
    meeting.port = job.master_port;
    meeting.port_source = "MASTER_PORT";
    meeting.port_is_served = lookup("TORCHELASTIC_USE_AGENT_STORE") == "True" || lookup("LOCKSTEP_STORE_HOSTED") == "1";
  } else if (!has_job_name(lookup)) {
    meeting.port = kDefaultPort;
  }
  return meeting;
}

bool spans_hosts(const Meeting& meeting) {
  return meeting.job.local_world_size < meeting.job.world_size;
}

}  // namespace lockstep::tool
