#pragma once

#include <string>
#include <vector>

/// A program with a progress line, which tests start in a terminal. Each rank executes the commands in order, for
/// example: progress_program "begin=epoch 1/2,300" run=500 "print=a line" end
int run_progress_program(std::vector<std::string> commands);
