#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

/// Runs the command given by the arguments (without the program's name) and returns the exit code.
int run_command(std::vector<std::string> arguments);

/// Each function adds one command to `app`. Parsing a command line with that command runs it and sets `exit_code`.
void add_run(CLI::App& app, const std::vector<std::string>& program, int& exit_code);
void add_doctor(CLI::App& app, int& exit_code);
void add_env(CLI::App& app, int& exit_code);
void add_bench(CLI::App& app, int& exit_code);
void add_test(CLI::App& app, int& exit_code);
void add_checkpoint(CLI::App& app, int& exit_code);
void add_compile(CLI::App& app, int& exit_code);
void add_top(CLI::App& app, int& exit_code);
void add_plot(CLI::App& app, int& exit_code);
void add_ui(CLI::App& app, int& exit_code);
void add_completion(CLI::App& app, int& exit_code);
void add_man(CLI::App& app, int& exit_code);
