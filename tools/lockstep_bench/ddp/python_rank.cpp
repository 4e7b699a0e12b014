#include "ddp/python_rank.h"

#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <lockstep/error.h>

extern char** environ;

namespace lockstep::bench {
namespace {

/// It lies beside this program.
std::string find_script() {
  char program[PATH_MAX];  // not by std::filesystem: the libtorch.so of some wheels exports a copy of it that crashes
  const ssize_t length = ::readlink("/proc/self/exe", program, sizeof program);
  const std::string_view path(program, static_cast<size_t>(std::max<ssize_t>(length, 0)));
  return fmt::format("{}/python_rank.py", path.substr(0, path.rfind('/')));
}

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

PythonRank::Child PythonRank::start(const Options& options) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw SystemError(fmt::format("socketpair: {}", std::strerror(errno)));
  const pid_t pid =
      spawn({options.python, find_script(), options.store, std::to_string(options.rank), std::to_string(options.ranks),
             options.has_mkldnn ? "mkldnn" : "no-mkldnn", fmt::format("{}", fmt::join(options.cores, ","))},
            ends[1]);
  ::close(ends[1]);
  return {pid, ends[0]};
}

PythonRank::PythonRank(const Options& options) : PythonRank(options.rank, start(options)) {
  await_answer();
}

PythonRank::~PythonRank() {
  ::kill(child_.pid, SIGKILL);  // it waits for a request, or is of no use any more
  ::waitpid(child_.pid, nullptr, 0);
  ::close(child_.line);
}

void PythonRank::ask(const std::string& request) {
  const std::string text = request + "\n";
  ::send(child_.line, text.data(), text.size(), MSG_NOSIGNAL);  // that nobody reads it shows when no answer comes
  await_answer();
}

void PythonRank::await_answer() {
  char answer = 0;
  ssize_t got = 0;
  do {
    got = ::read(child_.line, &answer, 1);
  } while (got < 0 && errno == EINTR);
  if (got != 1 || answer != '\n')
    throw SystemError(fmt::format("rank {} of PyTorch's own has ended: what it said stands above", rank_));
}

}  // namespace lockstep::bench
