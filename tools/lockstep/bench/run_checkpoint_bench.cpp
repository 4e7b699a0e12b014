#include "bench/run_bench.h"

#include <ftw.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iostream>
#include <optional>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <lockstep/error.h>
#include <lockstep/launcher.h>
#include <lockstep/version.h>

#include "bench/checkpoint_report.h"
#include "bench/coprocess.h"
#include "bench/launch_ranks.h"
#include "bench/operation.h"
#include "bench/request.h"
#include "doctor/machine.h"
#include "run/child_process.h"

namespace lockstep::bench {
namespace {

volatile std::sig_atomic_t stop_requested = 0;

class Stopped : public std::exception {
  const char* what() const noexcept override { return "stopped by a signal"; }
};

/// SIGINT and SIGTERM interrupt the wait for an answer, so that the files are removed.
void handle_stop_signals() {
  struct sigaction action {};
  action.sa_handler = [](int) { stop_requested = 1; };
  for (int stop : {SIGINT, SIGTERM}) ::sigaction(stop, &action, nullptr);
}

void throw_if_stopped() {
  if (stop_requested) throw Stopped();
}

/// A new folder, which is removed with its contents.
class BenchFolder {
 public:
  explicit BenchFolder(const std::string& parent) : path_(parent + "/lockstep-bench-XXXXXX") {
    if (!::mkdtemp(path_.data()))
      throw UsageError(
          fmt::format("--folder is {}, but no folder can be created in it: {}", parent, std::strerror(errno)));
  }
  ~BenchFolder() { remove(path_); }
  BenchFolder(const BenchFolder&) = delete;
  BenchFolder& operator=(const BenchFolder&) = delete;

  std::string file(const char* name) const { return path_ + "/" + name; }

  static void remove(const std::string& path) {
    ::nftw(
        path.c_str(), [](const char* entry, const struct stat*, int, struct FTW*) { return ::remove(entry); }, 16,
        FTW_DEPTH | FTW_PHYS);
  }

 private:
  std::string path_;
};

/// The folder in which to save. Throws UsageError if it is missing or too small for two checkpoints.
std::string choose_folder(const std::string& wanted, const CheckpointPlan& plan) {
  const auto folder = wanted.empty() ? std::filesystem::current_path().string() : wanted;
  const auto space = tool::space_at(folder);
  if (!space || !std::filesystem::is_directory(folder))
    throw UsageError(fmt::format("--folder is {}: there is no such folder", folder));
  const auto needed = 2 * static_cast<uint64_t>(plan.state_bytes());
  if (space->free_bytes < needed)
    throw UsageError(
        fmt::format("two checkpoints need {} on disk, but {} has {} free: use a smaller --bytes or another "
                    "--folder",
                    tool::format_bytes(needed), folder, tool::format_bytes(space->free_bytes)));
  return std::filesystem::absolute(folder).lexically_normal().string();
}

/// The states of both sides, one of them loaded again or in memory for asynchronous saves, and the file in the cache.
void check_memory(const CheckpointPlan& plan, bool has_python, const tool::Machine& machine) {
  const uint64_t needed = (has_python ? 4 : 3) * static_cast<uint64_t>(plan.state_bytes());
  const auto usable = tool::usable_memory_bytes(machine);
  if (needed > usable)
    throw UsageError(fmt::format("this needs {} of memory, but only {} are free: use a smaller --bytes",
                                 tool::format_bytes(needed), tool::format_bytes(usable)));
}

class CheckpointMeasurement {
 public:
  CheckpointMeasurement(const CheckpointPlan& plan, const BenchFolder& folder, CheckpointReport& report)
      : plan_(plan),
        ours_(folder.file("lockstep.pt")),
        pythons_(folder.file("python.pt")),
        directory_(folder.file("run")),
        report_(report) {}

  /// Saves and loads with lockstep and, unless it is null, with `python`, in turn. One round is not counted.
  void measure_files(Coprocess& lockstep, Coprocess* python) {
    for (int round = -1; round < plan_.rounds; ++round) {
      const auto times = [&](CheckpointSide side) -> std::vector<double>& { return report_.times_us[side]; };
      const auto take = [&](Coprocess& process, const char* command, const std::string& file, CheckpointSide side) {
        const auto answer = request(process, fmt::format("{} {}", command, file));
        if (round >= 0) times(side).push_back(answer.at("seconds").get<double>() * 1e6);
      };
      take(lockstep, "save", ours_, CheckpointSide::kSave);
      if (python) take(*python, "save", pythons_, CheckpointSide::kPythonSave);
      take(lockstep, "load", ours_, CheckpointSide::kLoad);
      take(lockstep, "load-unverified", ours_, CheckpointSide::kLoadUnverified);
      if (python) take(*python, "load", ours_, CheckpointSide::kPythonLoad);
      if (python && round < 0) request(lockstep, "load " + pythons_);  // only checked
    }
    for (const auto& file : {ours_, pythons_}) ::unlink(file.c_str());
  }

  /// The time that asynchronous saves block.
  void measure_stalls(Coprocess& lockstep) {
    for (int round = -1; round < plan_.rounds; ++round) {
      const auto answer = request(lockstep, "stall " + directory_);
      BenchFolder::remove(directory_);  // the next round's first save allocates its memory again
      if (round < 0) continue;
      report_.times_us[CheckpointSide::kFirstAsync].push_back(answer.at("first").get<double>() * 1e6);
      report_.times_us[CheckpointSide::kCopy].push_back(answer.at("copy").get<double>() * 1e6);
      report_.times_us[CheckpointSide::kLaterAsync].push_back(answer.at("later").get<double>() * 1e6);
    }
  }

 private:
  nlohmann::json request(Coprocess& process, const std::string& line) {
    throw_if_stopped();
    if (shows_progress_) std::cerr << fmt::format("\r\033[K{}", line) << std::flush;
    const auto answer = nlohmann::json::parse(process.request(line));
    if (shows_progress_) std::cerr << "\r\033[K" << std::flush;
    report_.wrong += answer.value("wrong", int64_t{0});
    return answer;
  }

  const CheckpointPlan& plan_;
  const std::string ours_, pythons_, directory_;
  CheckpointReport& report_;
  const bool shows_progress_ = ::isatty(STDERR_FILENO) != 0;
};

/// Starts both sides one after the other: each needs much memory while it creates its state.
void measure(const CheckpointPlan& plan, const std::optional<Python>& python, const BenchFolder& folder,
             CheckpointReport& report, const std::function<void()>& on_ready) {
  Coprocess lockstep("lockstep-bench", {find_bench_program(), "--checkpoint", to_text(plan)}, throw_if_stopped);
  const auto ready = nlohmann::json::parse(lockstep.read_answer());
  report.libtorch = ready.at("torch");
  report.sha256_gbps = ready.at("sha256_gbps");
  report.crc32_gbps = ready.at("crc32_gbps");
  std::optional<Coprocess> other;
  if (python) {
    const auto script = tool::find_helper_program("checkpoint_side.py").string();
    if (script.empty()) throw SystemError("checkpoint_side.py is neither beside lockstep nor in ../libexec/lockstep");
    other.emplace("Python", std::vector<std::string>{python->program, script, to_text(plan)}, throw_if_stopped);
    other->read_answer();
  }
  on_ready();
  CheckpointMeasurement measurement(plan, folder, report);
  measurement.measure_files(lockstep, other ? &*other : nullptr);
  other.reset();  // frees its memory
  measurement.measure_stalls(lockstep);
}

}  // namespace

int run_checkpoint_bench(const BenchArguments& arguments) {
  if (!arguments.plot_file.empty())
    throw UsageError(fmt::format("--plot draws time over size, but {} has one size: remove it", kCheckpoint));
  const auto machine = tool::read_machine();
  auto plan = make_checkpoint_plan(arguments.request);
  plan.threads = arguments.threads;
  CheckpointReport report{.parameter_bytes = plan.parameter_bytes(),
                          .state_bytes = plan.state_bytes(),
                          .tensors = 3 * plan.parameters.size(),
                          .threads = plan.threads,
                          .folder = choose_folder(arguments.request.folder, plan),
                          .has_sha_instructions = has_sha_instructions(tool::read_text("/proc/cpuinfo")),
                          .is_checked = plan.check};
  std::optional<Python> python;
  if (!arguments.request.against.empty()) python = find_python("", arguments.request.python);
  if (python) report.python_torch = python->torch;
  check_memory(plan, python.has_value(), machine);
  ::setenv("OMP_NUM_THREADS", std::to_string(plan.threads).c_str(), 1);

  handle_stop_signals();
  const BenchFolder folder(report.folder);
  try {
    measure(plan, python, folder, report, [&] {
      if (arguments.json) return;
      std::cout << fmt::format("# lockstep {} bench {}\n", LOCKSTEP_VERSION_STRING, kCheckpoint)
                << checkpoint_conditions(report,
                                         fmt::format("{} cores of {}", machine.allowed_cores, machine.cpu_model));
      if (python) std::cout << fmt::format("# python: PyTorch {} of {}\n", python->torch, python->program);
      std::cout << std::flush;
    });
  } catch (const std::exception&) {
    if (stop_requested) return static_cast<int>(LaunchExit::kPreempted);
    throw;
  }
  std::cout << (arguments.json ? to_json_line(report) + "\n" : checkpoint_table(report)) << std::flush;
  return report.wrong != 0 ? kWrongResults : 0;
}

}  // namespace lockstep::bench
