#include "run/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <thread>

#include <fmt/format.h>

#include "base/exit_status.h"

extern char** environ;

namespace lockstep::tool {
namespace {

using Clock = std::chrono::steady_clock;

/// A process blocked in a hanging driver does not die even on SIGKILL; after this time it is abandoned.
constexpr std::chrono::seconds kKillWait{2};

/// A pipe. The child inherits the write end.
class Pipe {
 public:
  Pipe() {
    if (::pipe2(ends_, O_CLOEXEC) != 0) ends_[0] = ends_[1] = -1;
  }
  ~Pipe() {
    close_end(0);
    close_end(1);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;

  bool is_open() const { return ends_[0] >= 0; }
  int to_read() const { return ends_[0]; }
  int to_write() const { return ends_[1]; }
  void close_writing() { close_end(1); }

  /// Returns false at end of file, and closes the read end.
  bool read_some(std::string& into) {
    char bytes[4096];
    const ssize_t got = ::read(ends_[0], bytes, sizeof bytes);
    if (got < 0 && errno == EINTR) return true;
    if (got <= 0)
      close_end(0);
    else
      into.append(bytes, static_cast<size_t>(got));
    return got > 0;
  }

 private:
  void close_end(int end) {
    if (ends_[end] >= 0) ::close(ends_[end]);
    ends_[end] = -1;
  }

  int ends_[2];
};

/// Returns false if the deadline passes before both streams end.
bool read_both(Pipe& output, std::string& out_text, Pipe& errors, std::string& err_text, Clock::time_point deadline) {
  while (output.to_read() >= 0 || errors.to_read() >= 0) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd ready[] = {{output.to_read(), POLLIN, 0}, {errors.to_read(), POLLIN, 0}};
    if (left <= 0 || ::poll(ready, 2, static_cast<int>(left)) == 0) return false;
    if (ready[0].revents != 0) output.read_some(out_text);
    if (ready[1].revents != 0) errors.read_some(err_text);
  }
  return true;
}

/// Returns false if the deadline passes first. A program may close its output long before it exits.
bool wait_for(pid_t child, int& status, Clock::time_point deadline) {
  for (;;) {
    const pid_t ended = ::waitpid(child, &status, WNOHANG);
    if (ended == child) return true;
    if ((ended < 0 && errno != EINTR) || Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

/// Returns the pid of the child, or a negative errno.
pid_t start(const std::vector<std::string>& arguments, int out, int err) {
  std::vector<char*> words;
  for (const auto& argument : arguments) words.push_back(const_cast<char*>(argument.c_str()));
  words.push_back(nullptr);
  posix_spawn_file_actions_t files;
  posix_spawnattr_t attributes;
  ::posix_spawn_file_actions_init(&files);
  ::posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&files, out, STDOUT_FILENO);
  ::posix_spawn_file_actions_adddup2(&files, err, STDERR_FILENO);
  ::posix_spawnattr_init(&attributes);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  ::posix_spawnattr_setpgroup(&attributes, 0);
  pid_t child = -1;
  const int error = ::posix_spawn(&child, words[0], &files, &attributes, words.data(), environ);
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&files);
  return error == 0 ? child : -error;
}

/// The last line that is not blank.
std::string last_line(const std::string& text) {
  const auto end = text.find_last_not_of(" \n");
  if (end == std::string::npos) return "";
  const auto before = text.find_last_of('\n', end);
  const auto from = before == std::string::npos ? 0 : before + 1;
  return text.substr(from, end - from + 1);
}

std::string describe_end(int status, const std::string& err_text) {
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return "";
  const std::string end = (WIFSIGNALED(status) ? "was " : "ended with ") + describe_exit_status(status);
  const std::string line = last_line(err_text);
  return line.empty() ? end : fmt::format("{}: {}", end, line);
}

}  // namespace

CapturedProcess capture_output(const std::function<pid_t(int out, int err)>& start, std::chrono::milliseconds limit) {
  CapturedProcess result;
  Pipe output, errors;
  if (!output.is_open() || !errors.is_open()) {
    result.start_failure = fmt::format("pipe: {}", ::strerror(errno));
    return result;
  }
  const pid_t child = start(output.to_write(), errors.to_write());
  if (child < 0) {
    result.start_failure = fmt::format("could not be started: {}", ::strerror(-child));
    return result;
  }
  output.close_writing();
  errors.close_writing();
  const auto deadline = Clock::now() + limit;
  result.timed_out =
      !read_both(output, result.output, errors, result.errors, deadline) || !wait_for(child, result.status, deadline);
  if (result.timed_out) {
    ::kill(-child, SIGKILL);
    wait_for(child, result.status, Clock::now() + kKillWait);
  }
  return result;
}

ProgramOutput run_program(const std::vector<std::string>& arguments, std::chrono::milliseconds limit) {
  const auto ran = capture_output([&](int out, int err) { return start(arguments, out, err); }, limit);
  if (!ran.start_failure.empty()) return {.failure = ran.start_failure};
  if (ran.timed_out)
    return {ran.output, fmt::format("did not end within {} s", static_cast<double>(limit.count()) / 1000)};
  return {ran.output, describe_end(ran.status, ran.errors)};
}

namespace fs = std::filesystem;

fs::path find_helper_program(const std::string& name) {
  std::error_code error;
  const fs::path folder = fs::read_symlink("/proc/self/exe", error).parent_path();
  for (const fs::path& place : {folder / name, folder / "../libexec/lockstep" / name})
    if (fs::exists(place, error)) return place.lexically_normal();
  return {};
}

}  // namespace lockstep::tool
