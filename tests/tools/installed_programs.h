#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "cli/command_line.h"
#include "cli/manual.h"
#include "run/child_process.h"

namespace lockstep::tool {

/// The manual of every command.
inline Manual all_commands() {
  const CommandLine command_line;
  return read_manual(command_line.app());
}

/// Runs a program that is found in PATH.
inline ProgramOutput run(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "/usr/bin/env");
  return run_program(arguments, std::chrono::seconds(60));
}

}  // namespace lockstep::tool
