#pragma once

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <iostream>

/// Set in the child of exit_code_of_fork().
inline bool is_forked_child = false;

#if defined(__SANITIZE_ADDRESS__)
/// LeakSanitizer calls this function at exit. It cannot check a forked child: it would report what the parent's other
/// threads have in their thread-local memory.
extern "C" __attribute__((used, visibility("default"))) inline int __lsan_is_turned_off() {
  return is_forked_child ? 1 : 0;
}
#endif

constexpr int kForkHangs = -1;

/// Runs the body in a forked child, which then calls exit(), so that static objects are destroyed there. Returns its
/// exit code, 128 plus the signal that ended it, or kForkHangs if it had to be killed. If the body throws, the exit
/// code is 1.
inline int exit_code_of_fork(const std::function<void()>& body,
                             std::chrono::milliseconds limit = std::chrono::seconds(20)) {
  std::cout << std::flush;
  std::fflush(nullptr);  // otherwise the child would print buffered output again
  const pid_t child = ::fork();
  if (child == 0) {
    is_forked_child = true;
    try {
      body();
    } catch (const std::exception& error) {
      std::cout << "forked child: " << error.what() << std::endl;
      std::exit(1);
    }
    std::exit(0);
  }
  const auto deadline = std::chrono::steady_clock::now() + limit;
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) != child) {
    if (std::chrono::steady_clock::now() > deadline) {
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
      return kForkHangs;
    }
    ::poll(nullptr, 0, 2);
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
