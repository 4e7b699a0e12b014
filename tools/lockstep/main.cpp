#include <algorithm>
#include <iostream>

#include <lockstep/launcher.h>
#include <lockstep/version.h>

#include "commands.h"
#include "nearest.h"
#include "program_cutter.h"

namespace {

constexpr int kUsage = static_cast<int>(lockstep::LaunchExit::kUsage);

/// A first word that is no command, which CLI11 would only call unexpected.
void check_command(const CLI::App& app, const std::vector<std::string>& arguments) {
  if (arguments.empty() || arguments[0].starts_with('-')) return;
  std::vector<std::string> names;
  for (const auto* command : app.get_subcommands([](const CLI::App*) { return true; }))
    names.push_back(command->get_name());
  if (std::find(names.begin(), names.end(), arguments[0]) != names.end()) return;
  throw CLI::ParseError("no command " + arguments[0] + "." + suggestion(arguments[0], names) + " See lockstep --help.",
                        CLI::ExitCodes::ExtrasError);
}

int run_command(std::vector<std::string> arguments) {
  CLI::App app("lockstep: distributed data-parallel training for C++ on LibTorch", "lockstep");
  app.set_version_flag("--version", "lockstep " LOCKSTEP_VERSION_STRING);
  app.require_subcommand(1);
  int exit_code = 0;
  std::vector<std::string> program;
  add_run(app, program, exit_code);
  add_doctor(app, exit_code);
  add_env(app, exit_code);
  try {
    check_command(app, arguments);
    if (!arguments.empty() && arguments[0] == "run") {
      std::vector<std::string> rest(arguments.begin() + 1, arguments.end());
      program = cut_program(*app.get_subcommand("run"), rest);
      rest.insert(rest.begin(), "run");
      arguments = std::move(rest);
    }
    std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
    app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    std::cerr << "lockstep: " << error.what() << "\n";
    return kUsage;
  }
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  if (auto code = lockstep::run_as_warden(argc, argv)) return *code;
  return run_command({argv + 1, argv + argc});
}
