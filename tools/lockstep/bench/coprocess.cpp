#include "bench/coprocess.h"

#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include <lockstep/error.h>

extern char** environ;

namespace lockstep::bench {
namespace {

pid_t spawn(std::vector<std::string> command, int socket) {
  std::vector<char*> words;
  for (auto& word : command) words.push_back(word.data());
  words.push_back(nullptr);
  posix_spawn_file_actions_t files;
  ::posix_spawn_file_actions_init(&files);
  ::posix_spawn_file_actions_adddup2(&files, socket, STDIN_FILENO);
  ::posix_spawn_file_actions_adddup2(&files, socket, STDOUT_FILENO);
  pid_t child = -1;
  const int error = ::posix_spawn(&child, words[0], &files, nullptr, words.data(), environ);
  ::posix_spawn_file_actions_destroy(&files);
  if (error != 0) throw SystemError(fmt::format("{} cannot be started: {}", command[0], std::strerror(error)));
  return child;
}

}  // namespace

Coprocess::Coprocess(std::string name, std::vector<std::string> command, std::function<void()> on_interrupt)
    : name_(std::move(name)), on_interrupt_(std::move(on_interrupt)) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw SystemError(fmt::format("socketpair: {}", std::strerror(errno)));
  try {
    pid_ = spawn(std::move(command), ends[1]);
  } catch (const SystemError&) {
    for (int end : ends) ::close(end);
    throw;
  }
  ::close(ends[1]);
  socket_ = ends[0];
}

Coprocess::~Coprocess() {
  ::kill(pid_, SIGKILL);  // it only waits for requests
  ::waitpid(pid_, nullptr, 0);
  ::close(socket_);
}

std::string Coprocess::request(const std::string& line) {
  const std::string text = line + "\n";
  ::send(socket_, text.data(), text.size(), MSG_NOSIGNAL);  // a failure shows in read_answer
  return read_answer();
}

std::string Coprocess::read_answer() {
  for (std::string answer;;) {
    char next = 0;
    const ssize_t got = ::read(socket_, &next, 1);
    if (got < 0 && errno == EINTR) {
      if (on_interrupt_) on_interrupt_();
      continue;
    }
    if (got != 1) throw PeerError(fmt::format("{} has ended: see its output above", name_));
    if (next == '\n') return answer;
    answer += next;
  }
}

}  // namespace lockstep::bench
