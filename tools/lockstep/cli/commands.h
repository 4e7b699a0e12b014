#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

/// Runs the command that the arguments (without the program's name) name and returns the exit code.
int run_command(std::vector<std::string> arguments);

/// Each adds one command to `lockstep`. When it is chosen, parsing runs it and sets the exit code.
void add_run(CLI::App& app, const std::vector<std::string>& program, int& exit_code);
void add_doctor(CLI::App& app, int& exit_code);
void add_env(CLI::App& app, int& exit_code);
void add_bench(CLI::App& app, int& exit_code);
void add_test(CLI::App& app, int& exit_code);
void add_completion(CLI::App& app, int& exit_code);
void add_man(CLI::App& app, int& exit_code);
