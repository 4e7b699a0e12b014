#include "bench/ranks.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include <fmt/format.h>

#include <lockstep/error.h>

#include "bench/plan.h"
#include "bench/shared_file.h"
#include "run/mpirun_command.h"

namespace lockstep::bench {
namespace {

/// Calls for each whole line until every writer is gone.
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

/// A thread that no signal interrupts: they are the launcher's.
std::thread start_quietly(const std::function<void()>& body) {
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread(body);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace

LaunchOptions rank_launch(int ranks, const std::string& plan, const RankOptions& options) {
  LaunchOptions launch;
  launch.standalone = true;
  launch.omp_threads = options.threads;
  launch.workers_per_node = options.by_mpirun ? "1" : std::to_string(ranks);
  if (options.by_mpirun) launch.command = tool::mpirun_command(ranks);  // ranks find their cores themselves
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

  auto reader = start_quietly([&] { read_lines(to_read.get(), on_line); });
  const int code = launch(rank_launch(plan.ranks, text(), options));
  to_write.close();  // the last writer: the reader ends
  reader.join();
  return code;
}

}  // namespace lockstep::bench
