#include "doctor/meeting.h"

#include <lockstep/error.h>
#include <lockstep/meeting_place.h>

namespace lockstep::tool {
namespace {

constexpr const char* kMethod = "LOCKSTEP_INIT_METHOD";

std::string source_of_host(const Environment& job, const Environment::Lookup& lookup) {
  if (lookup(kMethod)) return kMethod;
  if (lookup("MASTER_ADDR")) return "MASTER_ADDR";
  return job.master_addr.empty() ? "" : job.source;
}

std::string source_of_port(int port, const Environment& job, const Environment::Lookup& lookup) {
  if (lookup(kMethod)) return kMethod;
  if (job.master_port != 0) return port == job.master_port ? "MASTER_PORT" : "derived from MASTER_PORT";
  return port == kDefaultPort ? "" : "derived from the job's name";
}

}  // namespace

Meeting find_meeting(const Environment::Lookup& lookup) {
  Meeting meeting;
  try {
    meeting.job = Environment::detect(lookup);
    const auto place = find_meeting_place("env://", meeting.job, lookup);
    if (const auto* file = std::get_if<MeetingFile>(&place)) {
      meeting.kind = Meeting::Kind::kFile;
      meeting.file = file->path;
      return meeting;
    }
    const auto& port = std::get<MeetingPort>(place);
    meeting.host = port.endpoint.host;
    meeting.port = port.endpoint.port;
    meeting.port_is_served = !port.rank_zero_hosts;
  } catch (const Error& error) {
    meeting.kind = Meeting::Kind::kUnknown;
    meeting.refusal = error.what();
    return meeting;
  }
  meeting.host_source = source_of_host(meeting.job, lookup);
  meeting.port_source = source_of_port(meeting.port, meeting.job, lookup);
  return meeting;
}

bool spans_hosts(const Meeting& meeting) {
  return meeting.job.local_world_size < meeting.job.world_size;
}

}  // namespace lockstep::tool
