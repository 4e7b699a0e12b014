#include "launch/worker_processes.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>

#include <lockstep/error.h>
#include <lockstep/launcher.h>

#include "base/text.h"
#include "launch/process_tree.h"
#include "launch/supervisor.h"
#include "rendezvous/net/secret.h"

extern char** environ;

namespace lockstep {
namespace {

constexpr const char* kSupervisorCommand = "__supervisor";
constexpr auto kSupervisorLimit = std::chrono::seconds(15);  // the supervisor tries for 10 s to kill all workers

[[noreturn]] void throw_system_error(const std::string& call, int error) {
  const char* remedy = error == EMFILE || error == ENFILE ? "; raise the limit of open files (ulimit -n)"
                       : error == EAGAIN || error == ENOMEM
                           ? "; raise the limit of processes (ulimit -u) or free memory"
                           : "";
  throw SystemError(text(call, ": ", std::strerror(error), remedy));
}

/// Executes this program again, with `end` open and its number as the second argument.
pid_t start_supervisor(const FileDescriptor& end) {
  posix_spawn_file_actions_t files;
  ::posix_spawn_file_actions_init(&files);
  ::posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_addopen(&files, 1, "/dev/null", O_WRONLY, 0);
  ::posix_spawn_file_actions_adddup2(&files, end.get(), end.get());  // onto itself: clears FD_CLOEXEC
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  sigset_t defaults;
  ::sigemptyset(&defaults);
  ::sigaddset(&defaults, SIGPIPE);  // the launcher ignores it, workers must not
  ::posix_spawnattr_setsigdefault(&attributes, &defaults);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
  std::string name = "lockstep", command = kSupervisorCommand, number = std::to_string(end.get());
  char* argv[] = {name.data(), command.data(), number.data(), nullptr};
  pid_t pid = -1;
  const int error = ::posix_spawn(&pid, "/proc/self/exe", &files, &attributes, argv, environ);
  ::posix_spawn_file_actions_destroy(&files);
  ::posix_spawnattr_destroy(&attributes);
  if (error != 0) throw_system_error("posix_spawn of this program as the workers' supervisor", error);
  return pid;
}

/// Raises the soft limit of open files to the hard limit, because each worker needs two pipes and one connection to the
/// store. Returns the previous limit.
rlimit raise_file_limit() {
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  const rlimit raised{before.rlim_max, before.rlim_max};
  ::setrlimit(RLIMIT_NOFILE, &raised);  // a failure shows up later when a file cannot be opened
  return before;
}

std::pair<FileDescriptor, FileDescriptor> make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw_system_error("pipe for a worker's output", errno);
  ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
  ::fcntl(ends[0], F_SETPIPE_SZ, 1 << 20);  // fewer reads for much output; failure is harmless
  return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

}  // namespace

std::optional<int> run_as_supervisor(int argc, char** argv) {
  if (argc != 3 || std::string_view(argv[1]) != kSupervisorCommand) return std::nullopt;
  auto end = parse_number<int>(argv[2]);
  int type = 0;
  socklen_t size = sizeof type;
  if (!end || ::getsockopt(*end, SOL_SOCKET, SO_TYPE, &type, &size) != 0) return static_cast<int>(LaunchExit::kUsage);
  ::fcntl(*end, F_SETFD, FD_CLOEXEC);  // workers must not inherit the channel: it must close when this process ends
  try {
    return run_supervisor(Channel(FileDescriptor(*end)));
  } catch (const std::exception& error) {
    const std::string line = text("lockstep: ", error.what(), "\n");
    [[maybe_unused]] auto written = ::write(STDERR_FILENO, line.data(), line.size());
    kill_descendants();
    return static_cast<int>(LaunchExit::kInternal);
  }
}

WorkerProcesses::WorkerProcesses(const std::string& secret)
    : files_before_(raise_file_limit()), channel_{FileDescriptor()} {
  auto [own_end, supervisor_end] = Channel::make_ends();
  supervisor_ = start_supervisor(supervisor_end);
  ::prlimit(supervisor_, RLIMIT_NOFILE, &files_before_, nullptr);  // workers inherit the limit
  channel_ = Channel(std::move(own_end));
  channel_.send(secret.empty() ? Channel::Fields{"folder"} : Channel::Fields{"secret", secret});
}

WorkerProcesses::~WorkerProcesses() {
  end_all();
  ::setrlimit(RLIMIT_NOFILE, &files_before_);
}

std::pair<FileDescriptor, FileDescriptor> WorkerProcesses::start(int worker, const WorkerSpec& spec) {
  auto [out, out_end] = make_pipe();
  auto [err, err_end] = make_pipe();
  std::vector<std::string> cores;
  for (int core : spec.cores) cores.push_back(std::to_string(core));
  std::vector<FileDescriptor> worker_ends;
  worker_ends.push_back(std::move(out_end));
  worker_ends.push_back(std::move(err_end));
  channel_.send({"start", std::to_string(worker), pack(spec.command), pack(spec.environment), pack(cores)},
                std::move(worker_ends));
  return {std::move(out), std::move(err)};
}

void WorkerProcesses::signal_all(int number) {
  if (is_over_) return;
  channel_.send({"signal", std::to_string(number)});
  ::kill(supervisor_, SIGCONT);
}

void WorkerProcesses::end_all() {
  if (is_over_) return;
  is_over_ = true;
  ::shutdown(channel_.fd(), SHUT_WR);  // so that the supervisor reads end-of-file
  ::kill(supervisor_, SIGCONT);        // the supervisor may be stopped
  reap_supervisor();
}

void WorkerProcesses::reap_supervisor() {
  const auto deadline = std::chrono::steady_clock::now() + kSupervisorLimit;
  int status = 0;
  pid_t reaped = 0;
  while ((reaped = ::waitpid(supervisor_, &status, WNOHANG)) == 0 && std::chrono::steady_clock::now() < deadline)
    ::poll(nullptr, 0, 1);
  if (reaped == 0) {
    ::kill(supervisor_, SIGKILL);
    ::waitpid(supervisor_, &status, 0);
  }
  // If the supervisor was killed, its descendants are now children of this process (subreaper).
  if (WIFSIGNALED(status)) kill_descendants();
  if (!folder_.empty()) SecretFolder::remove(folder_);
}

std::vector<WorkerProcesses::Event> WorkerProcesses::read_events() {
  std::vector<Event> events;
  const bool is_connected = channel_.read_some();
  while (auto message = channel_.next()) {
    const auto& fields = *message;
    if (fields.at(0) == "folder") {
      folder_ = fields.at(1);
      continue;
    }
    if (fields.at(0) == "failed") {
      why_ = fields.at(1);
      continue;
    }
    auto kind = fields.at(0) == "started"   ? Event::Kind::kStarted
                : fields.at(0) == "refused" ? Event::Kind::kRefused
                                            : Event::Kind::kEnded;
    const bool was_stopped = kind == Event::Kind::kEnded && fields.at(3) == "stopped";
    events.push_back(
        {kind, static_cast<int>(to_number(fields.at(1))), static_cast<int>(to_number(fields.at(2))), was_stopped});
  }
  if (!is_connected) events.push_back({.kind = Event::Kind::kSupervisorGone, .why = why_});
  return events;
}

}  // namespace lockstep
