#pragma once

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

/// The whole of `lockstep`'s command line: every command with its options. The same table parses what the user wrote,
/// prints the help, and is read for the man pages and the scripts that complete words in a shell.
class CommandLine {
 public:
  CommandLine();
  CommandLine(const CommandLine&) = delete;  // the commands keep references to the members
  CommandLine& operator=(const CommandLine&) = delete;

  /// Runs the command that `arguments` (without the program's name) name and returns the exit code. Says on stderr what
  /// is wrong with them.
  int run(std::vector<std::string> arguments);

  const CLI::App& app() const { return app_; }

 private:
  CLI::App app_;                      // constant after construction, but for what parsing leaves in it
  std::vector<std::string> program_;  // written by run() before it parses
  int exit_code_ = 0;                 // written by the command
};
