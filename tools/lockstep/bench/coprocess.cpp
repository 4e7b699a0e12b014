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

pid_t spawn(std::vector<std::string> command, int line) {
  std::vector<char*> words;
  for (auto& word : command) words.push_back(word.data());
  words.push_back(nullptr);
  posix_spawn_file_actions_t files;
  ::posix_spawn_file_actions_init(&files);
  ::posix_spawn_file_actions_adddup2(&files, line, STDIN_FILENO);
  ::posix_spawn_file_actions_adddup2(&files, line, STDOUT_FILENO);
  pid_t child = -1;
  const int error = ::posix_spawn(&child, words[0], &files, nullptr, words.data(), environ);
  ::posix_spawn_file_actions_destroy(&files);
  if (error != 0) throw SystemError(fmt::format("{} cannot be started: {}", command[0], std::strerror(error)));
  return child;
}

}  // namespace

Companion::Companion(std::string who, std::vector<std::string> command) : who_(std::move(who)) {
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
  line_ = ends[0];
}

Companion::~Companion() {
  ::kill(pid_, SIGKILL);  // it waits for a request, or is of no use any more
  ::waitpid(pid_, nullptr, 0);
  ::close(line_);
}

std::string Companion::ask(const std::string& request) {
  const std::string text = request + "\n";
  ::send(line_, text.data(), text.size(), MSG_NOSIGNAL);  // that nobody reads it shows when no answer comes
  return await_answer();
}

std::string Companion::await_answer() {
  for (std::string answer;;) {
    char next = 0;
    const ssize_t got = ::read(line_, &next, 1);
    if (got < 0 && errno == EINTR) continue;
    if (got != 1) throw PeerError(fmt::format("{} has ended: what it said stands above", who_));
    if (next == '\n') return answer;
    answer += next;
  }
}

}  // namespace lockstep::bench
