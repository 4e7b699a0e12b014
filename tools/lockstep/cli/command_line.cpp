#include "cli/command_line.h"

#include <algorithm>
#include <iostream>
#include <numeric>
#include <regex>
#include <span>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <lockstep/launcher.h>
#include <lockstep/version.h>

#include "cli/commands.h"
#include "cli/help_text.h"

namespace {

constexpr int kUsage = static_cast<int>(lockstep::LaunchExit::kUsage);

constexpr const char* kLockstepFooter = R"(
lockstep COMMAND --help describes a command, its options and exit codes. If lockstep is installed, so does
man lockstep-COMMAND.

Examples:
  lockstep doctor
  lockstep run -n 4 ./train --epochs 3
  lockstep run --help

Exit codes:
  0   success
  2   wrong usage
)";

/// The Levenshtein distance.
size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t exchanged = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({exchanged, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

/// The element of `known` closest to `written`; empty if none is close.
std::string nearest(const std::string& written, const std::vector<std::string>& known) {
  std::string best;
  size_t best_distance = std::max<size_t>(2, written.size() / 3) + 1;
  for (const auto& candidate : known) {
    const bool begins = written.size() > 3 && candidate.starts_with(written);
    const size_t found = begins ? 0 : edit_distance(written, candidate);
    if (found >= best_distance) continue;
    best = candidate;
    best_distance = found;
  }
  return best;
}

/// Names that other programs have for lockstep's commands.
constexpr std::pair<const char*, const char*> kSynonyms[] = {
    {"compare", "diff"},    {"list", "ls"},      {"dir", "ls"},          {"info", "show"},       {"inspect", "show"},
    {"cat", "show"},        {"check", "verify"}, {"validate", "verify"}, {"remove", "prune"},    {"rm", "prune"},
    {"delete", "prune"},    {"clean", "prune"},  {"export", "convert"},  {"launch", "run"},      {"start", "run"},
    {"exec", "run"},        {"torchrun", "run"}, {"mpirun", "run"},      {"status", "top"},      {"monitor", "top"},
    {"watch", "top"},       {"dashboard", "ui"}, {"tensorboard", "ui"},  {"serve", "ui"},        {"web", "ui"},
    {"draw", "plot"},       {"graph", "plot"},   {"selftest", "test"},   {"benchmark", "bench"}, {"environment", "env"},
    {"diagnose", "doctor"}, {"manual", "man"}};

/// The command of which `written` is a synonym, if it is one of `known`; else the nearest command. Empty if there is
/// none.
std::string synonymous_or_nearest(const std::string& written, const std::vector<std::string>& known) {
  for (const auto& [synonym, name] : kSynonyms)
    if (written == synonym && std::find(known.begin(), known.end(), name) != known.end()) return name;
  return nearest(written, known);
}

/// " Did you mean NEAREST?", or an empty string.
std::string suggestion(const std::string& written, const std::vector<std::string>& known) {
  const auto found = synonymous_or_nearest(written, known);
  return found.empty() ? "" : " Did you mean " + found + "?";
}

std::vector<std::string> option_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const auto* option : app.get_options())
    for (const auto& name : option->get_lnames()) names.push_back("--" + name);
  return names;
}

bool is_streams(const std::string& argument) {
  static const std::regex kStreams("[0-3]|\\d+:[0-3](,\\d+:[0-3])*");
  return std::regex_match(argument, kStreams);
}

/// "--master_port=1" as {"--master-port", "=1"}; "-n4" as {"-n", "4"}.
std::pair<std::string, std::string> split_argument(const std::string& argument) {
  if (!argument.starts_with("--")) return {argument.substr(0, 2), argument.substr(2)};
  auto name = argument.substr(0, argument.find('='));
  auto value = argument.substr(name.size());
  std::replace(name.begin(), name.end(), '_', '-');
  return {name, value};
}

/// Removes the program and its arguments from the end of `arguments` (the words after "run") and returns them, so that
/// none of them is parsed as an option of lockstep. The program is the first word that is neither an option of `run`
/// nor its value, or the first word after "--". In the remaining options, '_' in names becomes '-', as torchrun allows,
/// and the optional value of --tee and --redirects is attached with '='. Throws CLI::ParseError for an unknown option.
std::vector<std::string> split_off_program(const CLI::App& run, std::vector<std::string>& arguments) {
  std::vector<std::string> own_options;
  size_t at = 0;
  while (at < arguments.size() && arguments[at].size() > 1 && arguments[at][0] == '-') {
    if (arguments[at] == "--") {
      ++at;
      break;
    }
    auto [name, value] = split_argument(arguments[at++]);
    const auto* option = run.get_option_no_throw(name);
    if (!option)
      throw CLI::ParseError("run: unknown option " + name + "." + suggestion(name, option_names(run)) +
                                " Put options of the program after its name.",
                            CLI::ExitCodes::ExtrasError);
    const bool has_value = option->get_items_expected_max() > 0;
    if (has_value && option->get_expected_min() == 0) {
      if (value.empty()) value = at < arguments.size() && is_streams(arguments[at]) ? arguments[at++] : "3";
      own_options.push_back("--" + option->get_lnames()[0] + (value.starts_with('=') ? "" : "=") + value);
      continue;
    }
    own_options.push_back(name + value);
    if (value.empty() && has_value && at < arguments.size()) own_options.push_back(arguments[at++]);
  }
  std::vector<std::string> program(arguments.begin() + static_cast<ptrdiff_t>(at), arguments.end());
  arguments = std::move(own_options);
  return program;
}

/// The names of the commands that the help shows.
std::vector<std::string> command_names(const CLI::App& app) {
  const auto commands = app.get_subcommands([](const CLI::App* command) { return !command->get_group().empty(); });
  std::vector<std::string> names;
  for (const auto* command : commands) names.push_back(command->get_name());
  return names;
}

bool has_command(const CLI::App& app, const std::string& name) {
  return !app.get_subcommands([&](const CLI::App* command) { return command->check_name(name); }).empty();
}

/// Whether the command has commands of its own, as `lockstep checkpoint` has.
bool is_group(const CLI::App& command) {
  return !command.get_subcommands([](const CLI::App*) { return true; }).empty();
}

/// The number of words at the beginning that name a command: 2 of "checkpoint ls FILE". `named` is set to the command.
size_t count_command_words(const std::vector<std::string>& arguments, const CLI::App*& named) {
  size_t count = 0;
  while (count < arguments.size() && is_group(*named) && has_command(*named, arguments[count]))
    named = named->get_subcommand(arguments[count++]);
  return count;
}

/// Throws CLI::ParseError if the first words are not a command; CLI11 would only call them unexpected.
void check_command(const CLI::App& app, std::span<const std::string> arguments) {
  if (arguments.empty())
    throw CLI::ParseError(fmt::format("a command is required: {}", fmt::join(command_names(app), ", ")),
                          CLI::ExitCodes::RequiredError);
  if (arguments[0].starts_with('-')) return;
  if (has_command(app, arguments[0])) {
    const auto* command = app.get_subcommand(arguments[0]);
    if (is_group(*command)) check_command(*command, arguments.subspan(1));
    return;
  }
#ifndef LOCKSTEP_ALL_COMMANDS
  for (const char* command : {"doctor", "env", "bench", "test", "checkpoint", "compile", "top", "ui"})
    if (arguments[0] == command)
      throw CLI::ParseError(fmt::format("{0} is not in this build, which contains only run and plot. To build all "
                                        "commands: cmake -DLOCKSTEP_COMMANDS=all build && cmake --build build.",
                                        command),
                            CLI::ExitCodes::ExtrasError);
#endif
  throw CLI::ParseError("unknown command " + arguments[0] + "." + suggestion(arguments[0], command_names(app)),
                        CLI::ExitCodes::ExtrasError);
}

/// The error with a hint to the help.
std::string with_hint(const std::string& error, const std::string& command) {
  const bool ends = error.ends_with('.') || error.ends_with('?');
  return fmt::format("lockstep: {}{} See lockstep{} --help.\n", error, ends ? "" : ".",
                     command.empty() ? "" : " " + command);
}

}  // namespace

CommandLine::CommandLine() : app_("Distributed data-parallel training for C++ on LibTorch", "lockstep") {
  // Set before the commands are added, which inherit these settings.
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
  add_checkpoint(app_, exit_code_);
  add_compile(app_, exit_code_);
  add_top(app_, exit_code_);
  add_ui(app_, exit_code_);
#endif
  add_plot(app_, exit_code_);
  add_completion(app_, exit_code_);
  add_man(app_, exit_code_);
}

int run_command(std::vector<std::string> arguments) {
  return CommandLine().run(std::move(arguments));
}

int CommandLine::run(std::vector<std::string> arguments) {
  const CLI::App* named = &app_;
  if (!arguments.empty() && arguments[0] == "help") {  // as git does: lockstep help run
    arguments.erase(arguments.begin());
    const size_t words = count_command_words(arguments, named);
    arguments.resize(std::min(arguments.size(), is_group(*named) ? words + 1 : words));
    arguments.emplace_back("--help");
  }
  named = &app_;
  const size_t words = count_command_words(arguments, named);
  const auto command = fmt::format("{}", fmt::join(arguments.begin(), arguments.begin() + ptrdiff_t(words), " "));
  try {
    check_command(app_, arguments);
    if (command == "run") {
      std::vector<std::string> rest(arguments.begin() + 1, arguments.end());
      program_ = split_off_program(*app_.get_subcommand("run"), rest);
      rest.insert(rest.begin(), "run");
      arguments = std::move(rest);
    }
    std::reverse(arguments.begin(), arguments.end());  // CLI11 expects reverse order
    app_.parse(arguments);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app_.exit(error);
    std::cerr << with_hint(error.what(), command);
    return kUsage;
  }
  return exit_code_;
}
