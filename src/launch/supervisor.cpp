#include "launch/supervisor.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <optional>
#include <set>

#include <lockstep/error.h>
#include <lockstep/launch_options.h>

#include "base/live_folder.h"
#include "base/text.h"
#include "launch/process_tree.h"
#include "rendezvous/net/secret.h"

// The supervisor guarantees that no worker or descendant of a worker outlives the launcher, even if the launcher is
// killed by SIGKILL. It rests on three mechanisms:
//   - The channel shows the end of the launcher: the supervisor reads end-of-file, kills all its descendants and exits.
//   - The supervisor is a child subreaper. A process whose parent ends becomes a child of the supervisor, also after
//     setsid() or a double fork, so kill_descendants() finds every process.
//   - Each worker has PR_SET_PDEATHSIG, so it is killed if the supervisor itself is killed. The launcher is a subreaper
//     too, and kills the remaining descendants then. If both are killed at once, descendants of workers may survive.
//
// The supervisor blocks all signals and has its own session, so neither the terminal nor a signal to the launcher's
// group ends it. Each worker is the leader of its own process group; "signal" messages go to the group. SIGCHLD arrives
// through a signalfd, next to the channel in one poll(). A process in uninterruptible sleep survives SIGKILL; the
// supervisor then exits with code 1 after the limit of kill_descendants().

namespace lockstep {
namespace {

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (auto& string : strings) result.push_back(string.data());
  result.push_back(nullptr);
  return result;
}

class Supervisor {
 public:
  explicit Supervisor(Channel channel) : channel_(std::move(channel)) {
    ::setsid();  // so that the terminal does not signal the supervisor
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    sigset_t all;
    ::sigfillset(&all);
    ::sigprocmask(SIG_SETMASK, &all, nullptr);
    sigset_t ends;
    ::sigemptyset(&ends);
    ::sigaddset(&ends, SIGCHLD);
    ends_ = FileDescriptor(::signalfd(-1, &ends, SFD_CLOEXEC | SFD_NONBLOCK));
  }

  int run() {
    while (watch()) {
    }
    return kill_descendants() ? 0 : 1;
  }

  /// Sends the error for the launcher's report.
  void report_failure(const std::string& why) noexcept {
    try {
      channel_.send({"failed", why});
    } catch (const std::exception&) {
      // The launcher reads end-of-file and reports that this process is gone.
    }
  }

 private:
  struct Worker {
    std::string index;      // assigned by the launcher
    std::set<int> signals;  // that were sent to the worker
  };

  bool watch() {
    std::array<pollfd, 2> ready{{{channel_.fd(), channel_.events(), 0}, {ends_.get(), POLLIN, 0}}};
    ::poll(ready.data(), ready.size(), -1);
    if (ready[1].revents != 0) reap();
    if (ready[0].revents & POLLOUT) channel_.flush();
    if ((ready[0].revents & ~POLLOUT) == 0) return true;
    bool is_connected = channel_.read_some();
    while (auto order = channel_.next()) execute(*order);
    return is_connected;
  }

  void execute(const Channel::Fields& order) {
    const auto& verb = order.at(0);
    if (verb == "secret") return keep_secret(order.at(1));
    if (verb == "folder") return make_folder();
    if (verb == "start") return start(order);
    if (verb == "signal") return signal_all(parse_number<int>(order.at(1)).value_or(0));
  }

  void keep_secret(const std::string& bytes) {
    folder_.emplace("lockstep");
    channel_.send({"folder", folder_->path()});  // first: the launcher removes the folder if this process is killed
    folder_->write(Secret::from_bytes(bytes));
    has_secret_ = true;
  }

  /// Creates the folder for the workers' note only. The job runs without the note as well.
  void make_folder() {
    try {
      folder_.emplace("lockstep");
      channel_.send({"folder", folder_->path()});
    } catch (const SystemError&) {
    }
  }

  void start(const Channel::Fields& order) {
    FileDescriptor out = channel_.take_file();
    FileDescriptor err = channel_.take_file();
    auto arguments = unpack(order.at(2));
    auto environment = unpack(order.at(3));
    if (has_secret_) environment.push_back(text(kSecretVariable, "=", folder_->secret_file()));
    if (folder_) environment.push_back(text(kRunNoteVariable, "=", SecretFolder::note_file(folder_->path())));
    auto argv = pointers(arguments);
    auto envp = pointers(environment);
    cpu_set_t cores;
    CPU_ZERO(&cores);
    for (const auto& core : unpack(order.at(4))) CPU_SET(parse_number<size_t>(core).value_or(0), &cores);
    int refusal[2];
    if (::pipe2(refusal, O_CLOEXEC) != 0) return refuse(order.at(1), errno);
    FileDescriptor error_reader(refusal[0]), error_writer(refusal[1]);
    const pid_t supervisor = ::getpid();
    const pid_t pid = ::fork();
    if (pid < 0) return refuse(order.at(1), errno);
    if (pid == 0) {
      become(supervisor, out.get(), err.get(), cores);
      ::execvpe(argv[0], argv.data(), envp.data());
      const int error = errno;
      [[maybe_unused]] auto written = ::write(error_writer.get(), &error, sizeof error);
      ::_exit(127);
    }
    ::setpgid(pid, pid);  // also in the parent: a signal may be sent before the child runs
    error_writer = FileDescriptor();
    int error = 0;
    if (::read(error_reader.get(), &error, sizeof error) == sizeof error) {
      ::waitpid(pid, nullptr, 0);
      return refuse(order.at(1), error);
    }
    workers_[pid] = {order.at(1), {}};
    channel_.send({"started", order.at(1), std::to_string(pid)});
  }

  /// Runs in the forked child: sets up process group, affinity, stdio and signals of the worker.
  static void become(pid_t supervisor, int out, int err, const cpu_set_t& cores) {
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != supervisor) ::_exit(127);
    if (CPU_COUNT(&cores) > 0) ::sched_setaffinity(0, sizeof cores, &cores);
    int in = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    ::dup2(in, 0);
    ::dup2(out, 1);
    ::dup2(err, 2);
    for (int number : {SIGINT, SIGTERM, SIGUSR1}) ::signal(number, SIG_DFL);  // a shell's "&" ignores SIGINT
    sigset_t none;
    ::sigemptyset(&none);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
  }

  void refuse(const std::string& index, int error) { channel_.send({"refused", index, std::to_string(error)}); }

  void signal_all(int number) {
    reap();  // workers that have ended already were not stopped by this signal
    for (auto& [pid, worker] : workers_) {
      ::kill(-pid, number);
      worker.signals.insert(number);
      if (number == SIGTERM) ::kill(-pid, SIGCONT);  // a stopped process handles SIGTERM only after SIGCONT
    }
  }

  void reap() {
    signalfd_siginfo ignored[8];
    while (::read(ends_.get(), ignored, sizeof ignored) > 0) {
    }
    int status = 0;
    for (pid_t pid = 0; (pid = ::waitpid(-1, &status, WNOHANG)) > 0;) {
      auto found = workers_.extract(pid);
      if (found.empty()) continue;
      const auto& worker = found.mapped();
      bool was_stopped = WIFSIGNALED(status) && worker.signals.contains(WTERMSIG(status));
      channel_.send({"ended", worker.index, std::to_string(status), was_stopped ? "stopped" : ""});
    }
  }

  Channel channel_;
  FileDescriptor ends_;
  std::optional<SecretFolder> folder_;
  bool has_secret_ = false;          // in the folder
  std::map<pid_t, Worker> workers_;  // not ended yet
};

}  // namespace

int run_supervisor(Channel channel) {
  Supervisor supervisor(std::move(channel));
  try {
    return supervisor.run();
  } catch (const std::exception& error) {
    supervisor.report_failure(error.what());
    kill_descendants();
    return static_cast<int>(LaunchExit::kInternal);
  }
}

}  // namespace lockstep
