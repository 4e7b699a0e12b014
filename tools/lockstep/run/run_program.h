#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace lockstep::tool {

/// What a program printed, or why there is nothing to read.
struct ProgramOutput {
  std::string output{};   // stdout
  std::string failure{};  // empty: it ended by itself with code 0
};

/// Runs arguments[0], a path, and waits for its end. After `limit` it is killed, and with it all that it started and
/// that still has its process group. Its stdin is empty; what it says on stderr becomes part of `failure`.
ProgramOutput run_program(const std::vector<std::string>& arguments, std::chrono::milliseconds limit);

}  // namespace lockstep::tool
