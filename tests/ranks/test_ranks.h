#pragma once

#include <iostream>
#include <string>
#include <vector>

// The programs that tests start as ranks. They are one program, because compiling each alone would mostly compile
// LibTorch's headers: test_ranks NAME ARGUMENTS... NAME is that of the source file, which describes the arguments.

/// Runs the program words[0] with the other words as arguments, and returns its exit code.
int run_test_rank(const std::vector<std::string>& words);

int run_attacked_rank(const std::vector<std::string>& arguments);
int run_hosts_rank(const std::vector<std::string>& arguments);
int run_leaving_rank(const std::vector<std::string>& arguments);
int run_mpi_rank(const std::vector<std::string>& arguments);
int run_progress_program(const std::vector<std::string>& arguments);
int run_resuming_rank(const std::vector<std::string>& arguments);
int run_running_rank(const std::vector<std::string>& arguments);
int run_shared_rank(const std::vector<std::string>& arguments);
int run_spawning(const std::vector<std::string>& arguments);

/// Prints a line as a whole: lines of several ranks do not mix.
inline void print_line(const std::string& line) {
  std::cout << line + "\n" << std::flush;
}
