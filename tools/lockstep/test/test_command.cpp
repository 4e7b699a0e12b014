#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <memory>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <lockstep/version.h>

#include "cli/commands.h"
#include "cli/seconds.h"
#include "doctor/findings.h"
#include "run/child_process.h"
#include "test/self_test.h"

namespace lockstep::tool {
namespace {

using std::chrono::milliseconds;

constexpr const char* kSelftestProgram = "lockstep-selftest";
constexpr auto kListLimit = std::chrono::seconds(60);  // enough to load LibTorch from a slow disk

struct TestArguments {
  int ranks = 2;
  std::vector<std::string> backends{};
  double timeout_seconds = 60;
  std::string program{};
  bool json = false;
};

std::vector<std::string> names_of(const std::vector<TestableBackend>& backends) {
  std::vector<std::string> names;
  for (const auto& backend : backends) names.push_back(backend.name);
  return names;
}

/// The requested backends in the requested order; all if none was requested.
std::vector<TestableBackend> choose(const std::vector<TestableBackend>& known,
                                    const std::vector<std::string>& requested) {
  if (requested.empty()) return known;
  std::vector<TestableBackend> chosen;
  for (const auto& name : requested) {
    const auto found = std::find_if(known.begin(), known.end(), [&](const auto& one) { return one.name == name; });
    if (found == known.end())
      throw CLI::ValidationError("--backends", fmt::format("unknown backend \"{}\"; this build has {}", name,
                                                           fmt::join(names_of(known), ", ")));
    chosen.push_back(*found);
  }
  return chosen;
}

/// Prints one row per backend as soon as its result is known; on a terminal also the backend being tested.
class Report {
 public:
  Report(const std::vector<TestableBackend>& backends, int ranks) : ranks_(ranks) {
    for (const auto& backend : backends) columns_ = std::max(columns_, static_cast<int>(backend.name.size()));
    std::cout << "lockstep " LOCKSTEP_VERSION_STRING ": all-reduce and training of a small model with each backend\n\n";
  }

  void begin(const TestableBackend& backend) const {
    if (is_terminal_)
      std::cout << fmt::format("  {:<7}  {:<{}}  {} ...", "", backend.name, columns_, ranks_of(backend));
    std::cout << std::flush;
  }

  void end(const TestableBackend& backend, const BackendResult& result) {
    if (is_terminal_) std::cout << "\r\033[K";
    const bool passed = result.failure.empty();
    (passed ? passed_ : failed_) += 1;
    Finding finding{backend.name, passed ? Status::kOk : Status::kError,
                    fmt::format("{}, {:.1f} s", ranks_of(backend), result.seconds), result.remedy};
    if (!passed) finding.found += ": " + result.failure;
    std::cout << to_row(finding, columns_, style_) << std::flush;
    if (!passed && !result.output.empty())
      outputs_ += fmt::format("\nOutput of the ranks of {}:\n{}", backend.name, result.output);
  }

  void conclude() const {
    std::cout << fmt::format("\n{} passed, {} failed\n", passed_, failed_) << outputs_ << std::flush;
  }

 private:
  std::string ranks_of(const TestableBackend& backend) const {
    using Ranks = TestableBackend::Ranks;
    if (backend.ranks == Ranks::kThreads)
      return fmt::format("{} thread{} of one process", ranks_, ranks_ == 1 ? "" : "s");
    const std::string processes = ranks_ == 1 ? "1 process" : fmt::format("{} processes", ranks_);
    return backend.ranks == Ranks::kMpirun ? processes + " of mpirun" : processes;
  }

  const int ranks_;
  const bool is_terminal_ = ::isatty(STDOUT_FILENO) != 0;
  const TableStyle style_ = stdout_style();
  int columns_ = 0;
  int passed_ = 0, failed_ = 0;
  std::string outputs_;
};

void print_json(const TestableBackend& backend, int ranks, const BackendResult& result) {
  const bool passed = result.failure.empty();
  nlohmann::ordered_json line{{"backend", backend.name},
                              {"ranks", ranks},
                              {"passed", passed},
                              {"seconds", std::round(result.seconds * 1000) / 1000}};
  line["failure"] = passed ? nlohmann::ordered_json() : nlohmann::ordered_json(result.failure);
  line["remedy"] = passed ? nlohmann::ordered_json() : nlohmann::ordered_json(result.remedy);
  std::cout << line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << std::endl;
  if (!passed) std::cerr << result.output;
}

int fail(const std::string& message) {
  std::cerr << "lockstep test: " << message << '\n';
  return 1;
}

int run_test(const TestArguments& arguments) {
  const std::string program =
      arguments.program.empty() ? find_helper_program(kSelftestProgram).string() : arguments.program;
  if (program.empty())
    return fail(fmt::format("{} is neither beside lockstep nor in ../libexec/lockstep", kSelftestProgram));
  const auto listed = run_program({program, "--list"}, kListLimit);
  if (!listed.failure.empty()) return fail(fmt::format("{} {}", program, listed.failure));

  const auto backends = choose(parse_backends(listed.output), arguments.backends);
  const milliseconds limit(std::llround(arguments.timeout_seconds * 1000));
  std::unique_ptr<Report> report;
  if (!arguments.json) report = std::make_unique<Report>(backends, arguments.ranks);
  bool all_passed = true;
  for (const auto& backend : backends) {
    if (report) report->begin(backend);
    const auto result = test_backend(program, backend, arguments.ranks, limit);
    if (report) report->end(backend, result);
    if (!report) print_json(backend, arguments.ranks, result);
    all_passed = all_passed && result.failure.empty();
  }
  if (report) report->conclude();
  return all_passed ? 0 : 1;
}

}  // namespace
}  // namespace lockstep::tool

void add_test(CLI::App& app, int& exit_code) {
  using lockstep::tool::TestArguments;
  auto arguments = std::make_shared<TestArguments>();
  auto* command = app.add_subcommand("test", "Test each backend with real ranks on this host");
  command->add_option("-n,--ranks", arguments->ranks, "Number of ranks")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  command
      ->add_option("--backends", arguments->backends,
                   "Backends to test, as in gloo,threads (default: all of this build)")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("LIST");
  command->add_option("--timeout", arguments->timeout_seconds, "Time limit for each backend")
      ->check(is_seconds(/*is_positive=*/true))
      ->type_name("SECONDS")
      ->capture_default_str();
  command->add_option("--selftest", arguments->program, "Path of lockstep-selftest, if it is not beside lockstep")
      ->type_name("FILE");
  command->add_flag("--json", arguments->json,
                    "Print JSON, one object {backend, ranks, passed, seconds, failure, remedy} per line");
  command->footer(
      "Each backend runs in its own job, so that a crash of one backend does not affect the others.\n"
      "The output of the ranks is printed only if a test fails. Backends whose ranks are threads run in one "
      "process.\n\n"
      "Examples:\n"
      "  lockstep test\n"
      "  lockstep test -n 4 --backends gloo\n"
      "  lockstep test --json\n\n"
      "Exit codes:\n"
      "  0   all backends passed\n"
      "  1   at least one backend failed\n"
      "  2   wrong usage");
  command->callback([arguments, &exit_code] { exit_code = lockstep::tool::run_test(*arguments); });
}
