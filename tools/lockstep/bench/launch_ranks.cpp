#include "bench/launch_ranks.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <sstream>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <lockstep/error.h>

#include "bench/rank_protocol.h"
#include "run/child_process.h"

namespace lockstep::bench {
namespace {

constexpr const char* kBenchProgram = "lockstep-bench";

std::string counted(int number, const char* noun) {
  return fmt::format("{} {}{}", number, noun, number == 1 ? "" : "s");
}

constexpr const char* kProbe = R"(
import sys, torch, torch.distributed as dist
lacks = None
if not sys.argv[1]:
    pass
elif not dist.is_available():
    lacks = "torch.distributed"
elif sys.argv[1] == "Gloo" and not dist.is_gloo_available():
    lacks = "Gloo"
elif sys.argv[1] == "NCCL" and not (dist.is_nccl_available() and torch.cuda.is_available()):
    lacks = "NCCL, or sees no GPU"
if lacks:
    sys.exit(f"torch {torch.__version__} has no {lacks}")
print(sys.executable, torch.__version__, sep="\n")
)";

/// Calls `on_line` for each complete line until all writers have closed the file.
void read_lines(int file, const std::function<void(const std::string&)>& on_line) {
  std::string lines;
  char bytes[4096];
  for (ssize_t got; (got = ::read(file, bytes, sizeof bytes)) != 0;) {
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return;
    lines.append(bytes, static_cast<size_t>(got));
    for (size_t end; (end = lines.find('\n')) != lines.npos; lines.erase(0, end + 1)) on_line(lines.substr(0, end));
  }
}

/// Starts a thread with all signals blocked: the launcher handles them.
std::thread start_without_signals(const std::function<void()>& body) {
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread(body);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace

std::string find_bench_program() {
  const auto program = tool::find_helper_program(kBenchProgram).string();
  if (program.empty())
    throw SystemError(fmt::format("{} is neither beside lockstep nor in ../libexec/lockstep", kBenchProgram));
  return program;
}

std::vector<std::string> query_backends(const std::string& program) {
  const auto answer = tool::run_program({program, "--backends"}, std::chrono::seconds(60));
  if (!answer.failure.empty()) throw SystemError(fmt::format("{} {}", program, answer.failure));
  return nlohmann::json::parse(answer.output);
}

void require_mpirun(const std::string& option) {
  if (!tool::has_mpirun()) throw UsageError(fmt::format("{}: mpi cannot be measured: {}", option, kNoMpirun));
}

void decide_core_binding(RunPlan& plan, const BenchArguments& arguments, const tool::Machine& machine) {
  plan.oversubscribed = plan.ranks > tool::usable_cores(machine);
  plan.bind = !arguments.no_bind && plan.ranks * arguments.threads <= machine.allowed_cores;
}

std::string describe_conditions(const RunPlan& plan, int threads, const tool::Machine& machine) {
  return fmt::format("{} of {} on {} of {}, {}", counted(plan.ranks, "rank"), counted(threads, "thread"),
                     counted(machine.allowed_cores, "core"), machine.cpu_model, plan.bind ? "pinned" : "not pinned");
}

Python find_python(const std::string& library, const std::string& wanted) {
  std::string lacking;
  std::vector<std::string> names{"python3", "/usr/bin/python3"};
  if (!wanted.empty()) names = {wanted};
  for (const auto& name : names) {
    const auto answer = tool::run_program({"/usr/bin/env", name, "-c", kProbe, library}, std::chrono::seconds(60));
    if (answer.failure.empty()) {
      Python python;
      std::istringstream lines(answer.output);
      std::getline(lines, python.program);
      std::getline(lines, python.torch);
      return python;
    }
    lacking += fmt::format("\n  {} {}", name, answer.failure);
  }
  throw UsageError(fmt::format(
      "--against python needs a python3 that has torch{}: {}. Tried:{}", library.empty() ? "" : " with " + library,
      library == "NCCL" ? "name one by --python" : "apt-get install python3-torch, or name one by --python", lacking));
}

LaunchOptions rank_launch_options(int ranks, const std::string& plan, const RankOptions& options) {
  LaunchOptions launch;
  launch.standalone = true;
  launch.omp_threads = options.threads;
  launch.workers_per_node = options.by_mpirun ? "1" : std::to_string(ranks);
  if (options.by_mpirun) launch.command = tool::mpirun_command(ranks);  // ranks pin themselves
  launch.command.insert(launch.command.end(), options.command.begin(), options.command.end());
  launch.command.push_back(plan);
  return launch;
}

int run_ranks(RunPlan& plan, const std::function<std::string()>& text, const RankOptions& options,
              const std::function<void(const std::string&)>& on_line) {
  SharedFile page = SharedFile::in_memory();
  if (::ftruncate(page.get(), page_bytes(plan.ranks)) != 0)
    throw SystemError(fmt::format("ftruncate of {} bytes: {}", page_bytes(plan.ranks), std::strerror(errno)));
  int ends[2];
  const int made = ::pipe2(ends, O_CLOEXEC);
  SharedFile to_read(made == 0 ? ends[0] : -1, "pipe"), to_write(ends[1], "pipe");
  plan.page = page.path();
  plan.results = to_write.path();

  auto reader = start_without_signals([&] { read_lines(to_read.get(), on_line); });
  const int code = launch(rank_launch_options(plan.ranks, text(), options));
  to_write.close();  // closes the last write end, so the reader ends
  reader.join();
  return code;
}

}  // namespace lockstep::bench
