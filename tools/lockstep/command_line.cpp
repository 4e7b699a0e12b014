#include "command_line.h"

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

}  // namespace

CommandLine::CommandLine() : app_("lockstep: distributed data-parallel training for C++ on LibTorch", "lockstep") {
  app_.set_version_flag("--version", "lockstep " LOCKSTEP_VERSION_STRING);
  app_.require_subcommand(1);
  add_run(app_, program_, exit_code_);
  add_doctor(app_, exit_code_);
  add_env(app_, exit_code_);
  add_test(app_, exit_code_);
  add_bench(app_, exit_code_);
}

int CommandLine::run(std::vector<std::string> arguments) {
  try {
    check_command(app_, arguments);
    if (!arguments.empty() && arguments[0] == "run") {
      std::vector<std::string> rest(arguments.begin() + 1, arguments.end());
      program_ = cut_program(*app_.get_subcommand("run"), rest);
      rest.insert(rest.begin(), "run");
      arguments = std::move(rest);
    }
    std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
    app_.parse(arguments);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app_.exit(error);
    std::cerr << "lockstep: " << error.what() << "\n";
    return kUsage;
  }
  return exit_code_;
}
