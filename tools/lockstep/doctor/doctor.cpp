#include "doctor/doctor.h"

#include <algorithm>
#include <iostream>
#include <memory>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <lockstep/version.h>

#include "cli/commands.h"
#include "doctor/checks.h"
#include "doctor/findings.h"

namespace lockstep::tool {
namespace {

Section examine_job(const Facts& facts) {
  return {"Job", {check_job(facts.rendezvous), check_secret(facts.secret, facts.rendezvous, facts.network)}};
}

Section examine_network(const Facts& facts) {
  Section section{"Network", {check_host_name(facts.rendezvous, facts.network)}};
  if (facts.rendezvous.kind != Rendezvous::Kind::kAddress) return section;
  section.findings.push_back(check_rendezvous_address(facts.rendezvous, facts.network));
  if (facts.network.local.empty()) return section;  // without a route the other checks would only repeat the failure
  section.findings.push_back(check_interface(facts.rendezvous, facts.network, facts.interface));
  section.findings.push_back(check_port(facts.rendezvous, facts.network));
  return section;
}

bool nccl_uses_shared_memory(const Facts& facts) {
  return has_backend(facts.probe, "nccl") && facts.probe.gpus.size() > 1 &&
         !is_on(facts.nccl_variables, "NCCL_SHM_DISABLE");
}

Section examine_machine(const Facts& facts) {
  const auto& machine = facts.machine;
  const int ranks = facts.rendezvous.job.local_world_size;
  const bool beyond = spans_hosts(facts.rendezvous) || is_beyond_loopback(facts.rendezvous, facts.network);
  return {
      "Machine",
      {check_cores(machine, ranks), check_threads(machine, ranks, facts.omp_num_threads), check_memory(machine, ranks),
       check_numa(machine, ranks), check_shared_memory(machine, nccl_uses_shared_memory(facts)),
       check_open_files(machine, facts.rendezvous.job.world_size), check_processes(machine, ranks),
       check_locked_memory(machine), check_clock(machine, beyond)}};
}

Section examine_torch(const Facts& facts) {
  const auto& probe = facts.probe;
  Section section{"LibTorch", {check_torch(probe)}};
  if (!probe.failure.empty()) return section;
  for (auto& finding :
       {check_blas(probe, facts.machine), check_convolutions(probe, facts.machine), check_backends(probe)})
    section.findings.push_back(finding);
  return section;
}

void examine_nccl(const Facts& facts, std::vector<Finding>& findings) {
  const auto& nccl = facts.nccl_variables;
  findings.push_back(check_nccl(facts.probe));
  if (!has_backend(facts.probe, "nccl")) return;
  if (!facts.gpus.installed.empty()) findings.push_back(check_compute_modes(facts.gpus));
  if (const auto named = nccl.find("NCCL_SOCKET_IFNAME"); named != nccl.end() && !named->second.empty())
    findings.push_back(check_nccl_interface(named->second, facts.network, spans_hosts(facts.rendezvous)));
  findings.push_back(check_nccl_variables(nccl, facts.probe.gpus.size(), facts.machine.has_infiniband));
}

Section examine_gpus(const Facts& facts) {
  const auto& gpus = facts.gpus;
  const auto& probe = facts.probe;
  if (!gpus_are_relevant(gpus, probe)) return {"GPUs", {{"GPUs", Status::kOk, "none; ranks train on the CPU"}}};
  Section section{"GPUs", {check_driver(gpus, probe)}};
  const bool has_answer = section.findings[0].status == Status::kOk;
  if (!has_answer && gpus.installed.empty() && probe.gpus.empty()) return section;
  section.findings.push_back(check_gpus(gpus, probe, facts.rendezvous.job.local_world_size));
  if (probe.failure.empty()) examine_nccl(facts, section.findings);
  return section;
}

Section examine_folders(const Facts& facts) {
  Section section{"Folders", {}};
  for (const auto& folder : facts.folders) section.findings.push_back(check_folder(folder));
  return section;
}

struct DoctorArguments {
  DoctorOptions options{};
  std::string checkpoint_folder{};
  bool json = false;
};

nlohmann::ordered_json findings_to_json(const std::vector<Section>& sections) {
  auto array = nlohmann::ordered_json::array();
  for (const auto& section : sections)
    for (const auto& finding : section.findings)
      array.push_back({{"check", finding.check},
                       {"status", name_of(finding.status)},
                       {"found", finding.found},
                       {"remedy", finding.remedy}});
  return array;
}

/// Text from the environment may not be valid UTF-8, which JSON requires.
std::string printed(const nlohmann::ordered_json& json) {
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

int run_doctor(DoctorArguments arguments) {
  if (!arguments.checkpoint_folder.empty()) arguments.options.checkpoint_folder = arguments.checkpoint_folder;
  const Facts facts = gather_facts(process_variables(), arguments.options);
  const auto sections = examine(facts);
  const bool has_errors = count(sections, Status::kError) > 0;
  if (arguments.json) {
    std::cout << printed(findings_to_json(sections)) << std::endl;
  } else {
    std::cout << fmt::format("lockstep {} on {}: {}, {}\n\n", LOCKSTEP_VERSION_STRING, facts.network.host.name,
                             facts.machine.system, facts.machine.architecture)
              << to_table(sections, stdout_style());
    if (!has_errors) std::cout << "\nRun `lockstep test` to test the backends with real ranks.\n";
    std::cout << std::flush;
  }
  return has_errors ? 1 : 0;
}

}  // namespace

Facts gather_facts(const Variables& variables, const DoctorOptions& options) {
  const auto lookup = [&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  };
  Facts facts;
  facts.rendezvous = find_rendezvous(lookup);
  facts.network = read_network(facts.rendezvous);
  facts.secret = read_secret_file_status(lookup);
  facts.folders = try_folders(lookup, facts.rendezvous, options.checkpoint_folder);
  facts.machine = read_machine();
  facts.probe = run_probe(options.probe_program);
  facts.gpus = read_gpus(lookup);
  facts.nccl_variables = nccl_variables(variables);
  facts.omp_num_threads = lookup("OMP_NUM_THREADS");
  facts.interface = lookup("LOCKSTEP_INTERFACE");
  return facts;
}

std::vector<Section> examine(const Facts& facts) {
  return {examine_job(facts),   examine_network(facts), examine_machine(facts),
          examine_torch(facts), examine_gpus(facts),    examine_folders(facts)};
}

}  // namespace lockstep::tool

void add_doctor(CLI::App& app, int& exit_code) {
  using lockstep::tool::DoctorArguments;
  auto arguments = std::make_shared<DoctorArguments>();
  auto* command = app.add_subcommand("doctor", "Check this machine for problems and suggest fixes");
  command
      ->add_option("--checkpoint-dir", arguments->checkpoint_folder,
                   "Also check that checkpoints can be written to this folder")
      ->type_name("DIR");
  command
      ->add_option("--probe", arguments->options.probe_program, "Path of lockstep-probe, if it is not beside lockstep")
      ->type_name("FILE");
  command->add_flag("--json", arguments->json, "Print a JSON array of {check, status, found, remedy}");
  command->footer(
      "The checks use the environment of this command: set MASTER_ADDR and the other variables, or start it\n"
      "in the same way as the job.\n"
      "\n"
      "Examples:\n"
      "  lockstep doctor\n"
      "  lockstep doctor --checkpoint-dir /data/run7\n"
      "  MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 lockstep doctor\n"
      "  srun --ntasks-per-node=1 lockstep doctor --json\n\n"
      "Exit codes:\n"
      "  0   no errors; there may be warnings\n"
      "  1   at least one check found an error\n"
      "  2   wrong usage");
  command->callback([arguments, &exit_code] { exit_code = lockstep::tool::run_doctor(*arguments); });
}
