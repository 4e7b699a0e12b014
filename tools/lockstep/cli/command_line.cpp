#include "cli/command_line.h"

#include <algorithm>
#include <iostream>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <lockstep/launcher.h>
#include <lockstep/version.h>

#include "cli/commands.h"
#include "cli/help_text.h"
#include "cli/nearest.h"
#include "cli/program_cutter.h"

namespace {

constexpr int kUsage = static_cast<int>(lockstep::LaunchExit::kUsage);

constexpr const char* kLockstepFooter = R"(
lockstep COMMAND --help tells all about one command, its exit codes included; so does man lockstep-COMMAND where lockstep
is installed.

Examples:
  lockstep doctor
  lockstep run -n 4 ./train --epochs 3
  lockstep run --help

Exit codes:
  0   the command did what it was asked to
  2   wrong usage
)";

/// The names of those commands that help shows.
std::vector<std::string> command_names(const CLI::App& app) {
  const auto commands = app.get_subcommands([](const CLI::App* command) { return !command->get_group().empty(); });
  std::vector<std::string> names;
  for (const auto* command : commands) names.push_back(command->get_name());
  return names;
}

bool has_command(const CLI::App& app, const std::string& name) {
  return !app.get_subcommands([&](const CLI::App* command) { return command->check_name(name); }).empty();
}

/// A first word that is no command, which CLI11 would only call unexpected.
void check_command(const CLI::App& app, const std::vector<std::string>& arguments) {
  if (arguments.empty())
    throw CLI::ParseError(fmt::format("a command is required: {}", fmt::join(command_names(app), ", ")),
                          CLI::ExitCodes::RequiredError);
  if (arguments[0].starts_with('-') || has_command(app, arguments[0])) return;
#ifndef LOCKSTEP_ALL_COMMANDS
  for (const char* command : {"doctor", "env", "bench", "test"})
    if (arguments[0] == command)
      throw CLI::ParseError(fmt::format("{0} is not in this build, which has run alone. To build all commands: "
                                        "cmake -DLOCKSTEP_COMMANDS=all build && cmake --build build.",
                                        command),
                            CLI::ExitCodes::ExtrasError);
#endif
  throw CLI::ParseError("no command " + arguments[0] + "." + suggestion(arguments[0], command_names(app)),
                        CLI::ExitCodes::ExtrasError);
}

/// The error, and where to read on.
std::string with_hint(const std::string& error, const std::string& command) {
  const bool ends = error.ends_with('.') || error.ends_with('?');
  return fmt::format("lockstep: {}{} See lockstep{} --help.\n", error, ends ? "" : ".",
                     command.empty() ? "" : " " + command);
}

}  // namespace

CommandLine::CommandLine() : app_("Distributed data-parallel training for C++ on LibTorch", "lockstep") {
  // Before the commands, which inherit what is set here.
  app_.set_help_flag("-h,--help", "Print this help");
  app_.formatter_fn([](const CLI::App* app, const std::string&, CLI::AppFormatMode) {
    return lockstep::tool::help_text(lockstep::tool::read_manual(*app), lockstep::tool::help_columns());
  });
  app_.set_version_flag("--version", "lockstep " LOCKSTEP_VERSION_STRING, "Print the version");
  app_.require_subcommand(1);
  app_.footer(kLockstepFooter);
  add_run(app_, program_, exit_code_);
#ifdef LOCKSTEP_ALL_COMMANDS
  add_doctor(app_, exit_code_);
  add_env(app_, exit_code_);
  add_bench(app_, exit_code_);
  add_test(app_, exit_code_);
#endif
  add_completion(app_, exit_code_);
  add_man(app_, exit_code_);
}

int run_command(std::vector<std::string> arguments) {
  return CommandLine().run(std::move(arguments));
}

int CommandLine::run(std::vector<std::string> arguments) {
  const std::string command = !arguments.empty() && has_command(app_, arguments[0]) ? arguments[0] : "";
  try {
    check_command(app_, arguments);
    if (command == "run") {
      std::vector<std::string> rest(arguments.begin() + 1, arguments.end());
      program_ = cut_program(*app_.get_subcommand("run"), rest);
      rest.insert(rest.begin(), "run");
      arguments = std::move(rest);
    }
    std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
    app_.parse(arguments);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app_.exit(error);
    std::cerr << with_hint(error.what(), command);
    return kUsage;
  }
  return exit_code_;
}
