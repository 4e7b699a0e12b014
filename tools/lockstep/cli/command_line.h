#pragma once

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

/// The command line of `lockstep`: every command with its options. The same table parses arguments, prints the help,
/// and generates the man pages and the completion scripts.
class CommandLine {
 public:
  CommandLine();
  CommandLine(const CommandLine&) = delete;  // the commands keep references to the members
  CommandLine& operator=(const CommandLine&) = delete;

  /// Runs the command given by `arguments` (without the program's name) and returns the exit code. Prints usage errors
  /// to stderr.
  int run(std::vector<std::string> arguments);

  const CLI::App& app() const { return app_; }

 private:
  CLI::App app_;                      // constant after construction, except for parsed values
  std::vector<std::string> program_;  // set by run() before parsing
  int exit_code_ = 0;                 // set by the command
};
