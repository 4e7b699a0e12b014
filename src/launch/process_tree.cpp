#include "launch/process_tree.h"

#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <sstream>
#include <string>

#include "base/text.h"

namespace lockstep {
namespace {

struct Entry {
  pid_t parent = 0;
  char state = '?';
  std::string program;
};

/// Parses /proc/PID/stat: "pid (name) state parent ..."; the name may contain any characters, including parentheses.
bool read_entry(const std::string& pid, Entry& entry) {
  std::ifstream file(text("/proc/", pid, "/stat"));
  std::string line{std::istreambuf_iterator<char>(file), {}};
  auto end = line.rfind(')');
  auto begin = line.find('(');
  if (begin == line.npos || end == line.npos) return false;
  entry.program = line.substr(begin + 1, end - begin - 1);
  return static_cast<bool>(std::istringstream(line.substr(end + 1)) >> entry.state >> entry.parent);
}

}  // namespace

std::vector<pid_t> descendants_of(pid_t process) {
  std::multimap<pid_t, std::pair<pid_t, char>> children;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc"), &::closedir);
  while (const dirent* found = folder ? ::readdir(folder.get()) : nullptr) {
    auto pid = parse_number<pid_t>(found->d_name);
    Entry entry;
    if (pid && read_entry(found->d_name, entry)) children.emplace(entry.parent, std::pair(*pid, entry.state));
  }
  std::vector<pid_t> result, open{process};
  while (!open.empty()) {
    auto [first, last] = children.equal_range(open.back());
    open.pop_back();
    for (; first != last; ++first) {
      auto [pid, state] = first->second;
      open.push_back(pid);
      if (state != 'Z') result.push_back(pid);
    }
  }
  return result;
}

std::string describe_process(pid_t process) {
  Entry entry;
  if (!read_entry(std::to_string(process), entry) || entry.state == 'Z') return "ended";
  const char* state = entry.state == 'R'   ? "running"
                      : entry.state == 'D' ? "waiting for a disk"
                      : entry.state == 'T' ? "stopped by a signal; resume it with kill -CONT"
                      : entry.state == 't' ? "stopped by a debugger"
                                           : "sleeping";
  return text(entry.program, ", ", state);
}

bool kill_descendants(std::chrono::milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  for (;;) {
    pid_t reaped = 0;
    do reaped = ::waitpid(-1, nullptr, WNOHANG);
    while (reaped > 0);
    if (reaped < 0 && errno == ECHILD) return true;  // orphans become children: no children means no descendants
    for (pid_t pid : descendants_of(::getpid())) ::kill(pid, SIGKILL);
    if (std::chrono::steady_clock::now() >= deadline) return false;
    ::poll(nullptr, 0, 1);
  }
}

}  // namespace lockstep
