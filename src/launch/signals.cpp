#include "launch/signals.h"

#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {

Signals::Signals() {
  sigset_t taken;
  ::sigemptyset(&taken);
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGTSTP}) ::sigaddset(&taken, signal);
  struct sigaction hangup {};
  ::sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler == SIG_IGN) ::sigdelset(&taken, SIGHUP);  // nohup
  file_ = FileDescriptor(::signalfd(-1, &taken, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!file_.is_open()) throw SystemError(text("could not create the launcher's signalfd: ", std::strerror(errno)));
  ::pthread_sigmask(SIG_BLOCK, &taken, &before_);
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &ignore, &pipe_before_);
}

Signals::~Signals() {
  while (next()) {
  }
  ::sigaction(SIGPIPE, &pipe_before_, nullptr);
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

std::optional<int> Signals::next() {
  signalfd_siginfo signal{};
  if (::read(file_.get(), &signal, sizeof signal) != sizeof signal) return std::nullopt;
  const int number = static_cast<int>(signal.ssi_signo);
  if (number != SIGTSTP) is_stop_requested_ = true;
  return number;
}

std::optional<int> Signals::wait_for(std::chrono::milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  for (;;) {
    if (auto signal = next()) return signal;
    auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) return std::nullopt;
    pollfd ready{file_.get(), POLLIN, 0};
    ::poll(&ready, 1, static_cast<int>(left.count()));
  }
}

}  // namespace lockstep
