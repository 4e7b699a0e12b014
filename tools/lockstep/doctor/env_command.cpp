#include <unistd.h>

#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "doctor/env_report.h"

namespace lockstep::tool {
namespace {

struct EnvArguments {
  std::string probe_program{};
  bool json = false;
};

void print_report(const EnvArguments& arguments) {
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  const auto report =
      describe(host, read_machine(), ask_probe(arguments.probe_program), telling_variables(process_variables()));
  // What comes from the environment need not be UTF-8, which JSON must be.
  if (arguments.json)
    std::cout << report.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << std::endl;
  else
    std::cout << to_text(report) << std::flush;
}

}  // namespace
}  // namespace lockstep::tool

void add_env(CLI::App& app, int& exit_code) {
  using lockstep::tool::EnvArguments;
  auto arguments = std::make_shared<EnvArguments>();
  auto* command = app.add_subcommand("env", "Print what a bug report needs: versions, machine, variables");
  command
      ->add_option("--probe", arguments->probe_program,
                   "The program that asks LibTorch, when it is not beside lockstep")
      ->type_name("FILE");
  command->add_flag("--json", arguments->json, "Print one JSON object");
  command->footer(
      "Variables whose names speak of a secret, token, key or password are shown without their values.\n\n"
      "Examples:\n"
      "  lockstep env\n"
      "  lockstep env --json > environment.json\n\n"
      "Exit codes:\n"
      "  0   the report was printed\n"
      "  2   wrong usage");
  command->callback([arguments, &exit_code] {
    lockstep::tool::print_report(*arguments);
    exit_code = 0;
  });
}
