#include <iostream>
#include <memory>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <lockstep/version.h>

#include "cli/commands.h"
#include "doctor/doctor.h"
#include "doctor/table.h"

namespace lockstep::tool {
namespace {

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

/// What comes from the environment need not be UTF-8, which JSON must be.
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
              << to_table(sections, style_of_stdout());
    if (!has_errors) std::cout << "\n`lockstep test` tries the backends with real ranks.\n";
    std::cout << std::flush;
  }
  return has_errors ? 1 : 0;
}

}  // namespace
}  // namespace lockstep::tool

void add_doctor(CLI::App& app, int& exit_code) {
  using lockstep::tool::DoctorArguments;
  auto arguments = std::make_shared<DoctorArguments>();
  auto* command = app.add_subcommand("doctor", "Check what breaks training here, and say how to mend it");
  command
      ->add_option("--checkpoint-dir", arguments->checkpoint_folder, "Also check that checkpoints can be written here")
      ->type_name("DIR");
  command
      ->add_option("--probe", arguments->options.probe_program,
                   "The program that asks LibTorch, when it is not beside lockstep")
      ->type_name("FILE");
  command->add_flag("--json", arguments->json, "Print a JSON array of {check, status, found, remedy}");
  command->footer(
      "Judges by the environment it is started in: set MASTER_ADDR and the rest, or start it as the job would be.\n"
      "\n"
      "Examples:\n"
      "  lockstep doctor\n"
      "  lockstep doctor --checkpoint-dir /data/run7\n"
      "  MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 lockstep doctor\n"
      "  srun --ntasks-per-node=1 lockstep doctor --json\n\n"
      "Exit codes:\n"
      "  0   no errors; there may be warnings\n"
      "  1   something is an error\n"
      "  2   wrong usage");
  command->callback([arguments, &exit_code] { exit_code = lockstep::tool::run_doctor(*arguments); });
}
