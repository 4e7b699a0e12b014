#include "run/run_program.h"

#include <fcntl.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/format.h>

#include "run/captured_process.h"

extern char** environ;

namespace lockstep::tool {
namespace {

/// The child's pid, or minus the error.
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

/// The last line that says something.
std::string last_line(const std::string& text) {
  const auto end = text.find_last_not_of(" \n");
  if (end == std::string::npos) return "";
  const auto before = text.find_last_of('\n', end);
  const auto from = before == std::string::npos ? 0 : before + 1;
  return text.substr(from, end - from + 1);
}

std::string describe_end(int status, const std::string& complained) {
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return "";
  std::string end = WIFSIGNALED(status)
                        ? fmt::format("was ended by signal {} ({})", WTERMSIG(status), ::strsignal(WTERMSIG(status)))
                        : fmt::format("ended with code {}", WEXITSTATUS(status));
  const std::string line = last_line(complained);
  return line.empty() ? end : fmt::format("{}: {}", end, line);
}

}  // namespace

ProgramOutput run_program(const std::vector<std::string>& arguments, std::chrono::milliseconds limit) {
  const auto ran = capture([&](int out, int err) { return start(arguments, out, err); }, limit);
  if (!ran.refusal.empty()) return {.failure = ran.refusal};
  if (ran.is_late)
    return {ran.output, fmt::format("did not end within {} s", static_cast<double>(limit.count()) / 1000)};
  return {ran.output, describe_end(ran.status, ran.errors)};
}

}  // namespace lockstep::tool
