#include "test/self_test.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <lockstep/launcher.h>

#include "base/exit_status.h"
#include "run/child_process.h"

namespace lockstep::tool {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;

constexpr const char* kErrorPrefix = "lockstep-selftest: ";  // precedes the error message of a rank

/// Forks the launcher: it writes to the pipes of this process, may be killed, and must not outlive this process.
pid_t start_launcher(const LaunchOptions& options, int out, int err) {
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) return -errno;
  if (child > 0) {
    ::setpgid(child, child);  // also in the parent: the child may be killed before it runs
    return child;
  }
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
  ::dup2(out, STDOUT_FILENO);
  ::dup2(err, STDERR_FILENO);
  ::_exit(launch(options));
}

/// Removes the report, which is the last line, from the launcher's stderr; returns null if there is none.
json extract_report(std::string& errors) {
  while (!errors.empty() && errors.back() == '\n') errors.pop_back();
  const auto before = errors.rfind('\n');
  const auto from = before == std::string::npos ? 0 : before + 1;
  const json report = json::parse(errors.substr(from), nullptr, false);
  if (!report.is_object()) return nullptr;
  errors.erase(from);
  return report;
}

/// The error message printed by the rank; empty if it printed none.
std::string reported_error(const json& culprit) {
  std::string message;
  for (const auto& line : culprit.at("stderr_tail"))
    if (const auto text = line.get<std::string>(); text.starts_with(kErrorPrefix))
      message = text.substr(std::strlen(kErrorPrefix));
  return message.empty() ? culprit.at("uncaught").get<std::string>() : message;
}

std::string remedy_for_signal(int number) {
  if (number == SIGKILL) return "a process or the kernel (out of memory) killed it: see dmesg; try fewer ranks with -n";
  return "the backend or a library below it crashed: report this with the output below and the output of `lockstep "
         "env`";
}

void describe_culprit(const json& culprit, BackendResult& result) {
  result.failure = reported_error(culprit);
  result.remedy = "run `lockstep doctor` to check this machine; the output of the ranks is below";
  if (!result.failure.empty()) return;
  result.failure =
      fmt::format("rank {} (pid {} on {}): {}", culprit.at("rank").get<int>(), culprit.at("pid").get<int>(),
                  culprit.at("host").get<std::string>(), culprit.at("how").get<std::string>());
  if (culprit.contains("signal")) result.remedy = remedy_for_signal(culprit.at("signal").get<int>());
}

/// The error message of a launcher that could not start the ranks.
std::string launcher_error(const std::string& errors) {
  constexpr std::string_view kLauncher = "lockstep run: ";
  const auto line = errors.substr(errors.rfind('\n') + 1);
  return line.starts_with(kLauncher) ? line.substr(kLauncher.size()) : line;
}

}  // namespace

std::vector<TestableBackend> parse_backends(const std::string& printed) {
  std::vector<TestableBackend> backends;
  std::istringstream lines(printed);
  using Ranks = TestableBackend::Ranks;
  for (std::string name, ranks; lines >> name >> ranks;)
    backends.push_back({name, ranks == "threads"  ? Ranks::kThreads
                              : ranks == "mpirun" ? Ranks::kMpirun
                                                  : Ranks::kProcesses});
  return backends;
}

BackendResult launch_result(const CapturedProcess& launcher, milliseconds limit) {
  BackendResult result;
  if (!launcher.start_failure.empty()) {
    result.failure = "the launcher " + launcher.start_failure;
    result.remedy = "run `lockstep doctor` to check the limits of this machine";
    return result;
  }
  std::string errors = launcher.errors;
  const json report = launcher.timed_out ? json() : extract_report(errors);
  result.output = launcher.output + errors;
  if (launcher.timed_out) {
    result.failure = fmt::format("the ranks did not finish within {} s and were killed",
                                 std::chrono::duration<double>(limit).count());
    result.remedy = "increase --timeout; if that does not help, attach gdb -p PID to find the hang";
  } else if (!WIFEXITED(launcher.status)) {
    result.failure = "the launcher was " + describe_exit_status(launcher.status);
    result.remedy = remedy_for_signal(WTERMSIG(launcher.status));
  } else if (WEXITSTATUS(launcher.status) == 0) {
    return result;
  } else if (report.is_object() && report.at("culprit").is_object()) {
    describe_culprit(report.at("culprit"), result);
  } else {
    result.failure = report.is_object() ? report.at("message").get<std::string>() : launcher_error(errors);
    result.remedy = "run `lockstep doctor` to check this machine";
  }
  return result;
}

BackendResult test_backend(const std::filesystem::path& program, const TestableBackend& backend, int ranks,
                           milliseconds limit) {
  if (backend.ranks == TestableBackend::Ranks::kMpirun && !has_mpirun()) {
    BackendResult missing;
    missing.failure = "no program mpirun in PATH";
    missing.remedy = "install Open MPI (apt-get install openmpi-bin), or exclude this backend with --backends";
    return missing;
  }
  // Calls time out first, so that a waiting rank can report the missing rank before all are killed.
  const milliseconds call_limit = std::max(limit * 3 / 4, milliseconds(1));
  LaunchOptions options;
  if (backend.ranks == TestableBackend::Ranks::kMpirun) options.command = mpirun_command(ranks);
  for (const auto& word : {program.string(), backend.name, std::to_string(ranks), std::to_string(call_limit.count())})
    options.command.push_back(word);
  options.workers_per_node = std::to_string(backend.ranks == TestableBackend::Ranks::kProcesses ? ranks : 1);
  options.standalone = true;
  options.json = true;
  const auto start = std::chrono::steady_clock::now();
  auto result =
      launch_result(capture_output([&](int out, int err) { return start_launcher(options, out, err); }, limit), limit);
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

}  // namespace lockstep::tool
