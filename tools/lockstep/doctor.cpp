#include "doctor.h"

#include <algorithm>
#include <cstdlib>

#include "judge_job.h"
#include "judge_machine.h"
#include "judge_network.h"
#include "judge_torch.h"

namespace lockstep::tool {
namespace {

Section examine_job(const Facts& facts) {
  return {"Job", {judge_job(facts.meeting), judge_secret(facts.secret, facts.meeting, facts.network)}};
}

Section examine_network(const Facts& facts) {
  Section section{"Network", {judge_host_name(facts.meeting, facts.network)}};
  if (facts.meeting.kind != Meeting::Kind::kAddress) return section;
  section.findings.push_back(judge_meeting_address(facts.meeting, facts.network));
  if (facts.network.local.empty()) return section;  // no way leads there: the rest only follows from that
  section.findings.push_back(judge_interface(facts.meeting, facts.network, facts.interface));
  section.findings.push_back(judge_port(facts.meeting, facts.network));
  return section;
}

Section examine_machine(const Facts& facts) {
  const auto& machine = facts.machine;
  const int ranks = facts.meeting.job.local_world_size;
  const bool beyond = spans_hosts(facts.meeting) || meets_beyond_loopback(facts.meeting, facts.network);
  return {"Machine",
          {judge_cores(machine, ranks), judge_threads(machine, ranks, facts.omp_num_threads),
           judge_memory(machine, ranks), judge_numa(machine, ranks), judge_shared_memory(machine),
           judge_open_files(machine, facts.meeting.job.world_size), judge_processes(machine, ranks),
           judge_locked_memory(machine), judge_clock(machine, beyond)}};
}

Section examine_torch(const Facts& facts) {
  const auto& probe = facts.probe;
  Section section{"LibTorch", {judge_torch(probe)}};
  if (!probe.failure.empty()) return section;
  for (auto& finding : {judge_blas(probe, facts.machine), judge_convolutions(probe, facts.machine),
                        judge_gpus(probe, facts.machine, facts.meeting.job.local_world_size, facts.visible_devices),
                        judge_nccl(probe), judge_backends(probe)})
    section.findings.push_back(finding);
  return section;
}

Section examine_folders(const Facts& facts) {
  Section section{"Folders", {}};
  for (const auto& folder : facts.folders) section.findings.push_back(judge_folder(folder));
  return section;
}

}  // namespace

Facts gather_facts(const Environment::Lookup& lookup, const DoctorOptions& options) {
  Facts facts;
  facts.meeting = find_meeting(lookup);
  facts.network = read_network(facts.meeting);
  facts.secret = read_secret_file_status(lookup);
  facts.folders = try_folders(lookup, facts.meeting, options.checkpoint_folder);
  facts.machine = read_machine();
  facts.probe = ask_probe(options.probe_program);
  facts.omp_num_threads = lookup("OMP_NUM_THREADS");
  facts.interface = lookup("LOCKSTEP_INTERFACE");
  facts.visible_devices = lookup("CUDA_VISIBLE_DEVICES");
  return facts;
}

std::vector<Section> examine(const Facts& facts) {
  return {examine_job(facts), examine_network(facts), examine_machine(facts), examine_torch(facts),
          examine_folders(facts)};
}

int count(const std::vector<Section>& sections, Status status) {
  int number = 0;
  for (const auto& section : sections)
    number += static_cast<int>(std::count_if(section.findings.begin(), section.findings.end(),
                                             [&](const Finding& finding) { return finding.status == status; }));
  return number;
}

std::optional<std::string> process_variable(const std::string& variable) {
  const char* value = std::getenv(variable.c_str());
  if (value == nullptr) return std::nullopt;
  return value;
}

}  // namespace lockstep::tool
