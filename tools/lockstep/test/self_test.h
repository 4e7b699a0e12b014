#pragma once

#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

#include "run/child_process.h"

namespace lockstep::tool {

/// A backend that the program lockstep-selftest was built with.
struct TestableBackend {
  enum class Ranks { kProcesses, kThreads, kMpirun };  // kThreads: of one process. kMpirun: processes that it starts

  std::string name{};
  Ranks ranks = Ranks::kProcesses;

  bool operator==(const TestableBackend&) const = default;
};

/// How the checks went over one of them.
struct BackendResult {
  double seconds = 0;
  std::string failure{};  // empty: passed
  std::string remedy{};
  std::string output{};  // of the ranks
};

/// What `lockstep-selftest --list` printed.
std::vector<TestableBackend> parse_backends(const std::string& printed);

/// Starts lockstep-selftest, at `program`, as the ranks of a job of its own and waits for its end; after `limit` all
/// are killed. Whatever happens to them, this process goes on.
BackendResult test_backend(const std::filesystem::path& program, const TestableBackend& backend, int ranks,
                           std::chrono::milliseconds limit);

/// Pure: what follows from how the launcher ended and what it reported.
BackendResult launch_result(const CapturedProcess& launcher, std::chrono::milliseconds limit);

}  // namespace lockstep::tool
