#include <iostream>
#include <map>
#include <new>
#include <string>

#include <CLI/CLI.hpp>

#include <lockstep/error.h>

#include "checkpoint/arguments.h"
#include "checkpoint/operations.h"
#include "checkpoint/table.h"

namespace lockstep::checkpoint {
namespace {

constexpr int kFailure = 1;
constexpr int kUsage = 2;

/// Prints one line: exceptions of LibTorch have a backtrace below it.
int report(const Arguments& arguments, const std::string& message, int code) {
  std::cerr << "lockstep checkpoint " + arguments.command + ": " + printable(message.substr(0, message.find('\n'))) +
                   "\n";
  return code;
}

int run(const Arguments& arguments) {
  static const std::map<std::string, int (*)(const Arguments&)> kCommands{
      {"ls", run_ls},     {"show", run_show},       {"verify", run_verify},
      {"diff", run_diff}, {"convert", run_convert}, {"prune", run_prune}};
  // As in diff(1), 1 says that the files differ, so a failure is 2.
  const int failure = arguments.command == "diff" ? kUsage : kFailure;
  try {
    return kCommands.at(arguments.command)(arguments);
  } catch (const UsageError& error) {
    return report(arguments, error.what(), kUsage);
  } catch (const std::bad_alloc&) {
    return report(arguments, "not enough memory to load the file: use a machine with more memory", failure);
  } catch (const std::exception& error) {
    return report(arguments, error.what(), failure);
  }
}

}  // namespace

int run_checkpoint_program(int argc, const char* const* argv) {
  CLI::App app("The commands of `lockstep checkpoint`", "lockstep-checkpoint");
  Arguments arguments;
  add_checkpoint_commands(app, arguments);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return error.get_exit_code() == 0 ? app.exit(error) : report(arguments, error.what(), kUsage);
  }
  return run(arguments);
}

}  // namespace lockstep::checkpoint
