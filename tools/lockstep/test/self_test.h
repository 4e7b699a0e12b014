#pragma once

#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

#include "run/child_process.h"

namespace lockstep::tool {

/// A backend that lockstep-selftest was built with.
struct TestableBackend {
  /// kThreads: threads of one process. kMpirun: processes started by mpirun.
  enum class Ranks { kProcesses, kThreads, kMpirun };

  std::string name{};
  Ranks ranks = Ranks::kProcesses;

  bool operator==(const TestableBackend&) const = default;
};

/// The result of the checks with one backend.
struct BackendResult {
  double seconds = 0;
  std::string failure{};  // empty: passed
  std::string remedy{};
  std::string output{};  // output of the ranks
};

/// Parses the output of `lockstep-selftest --list`.
std::vector<TestableBackend> parse_backends(const std::string& printed);

/// Runs lockstep-selftest, at `program`, as the ranks of a job and blocks until it ends; kills all ranks after `limit`.
/// A crash of the ranks does not affect this process.
BackendResult test_backend(const std::filesystem::path& program, const TestableBackend& backend, int ranks,
                           std::chrono::milliseconds limit);

/// Derives the result from the launcher's exit status and report. Pure.
BackendResult launch_result(const CapturedProcess& launcher, std::chrono::milliseconds limit);

}  // namespace lockstep::tool
