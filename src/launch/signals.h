#pragma once

#include <signal.h>

#include <chrono>
#include <optional>

#include "rendezvous/net/socket.h"

namespace lockstep {

/// Blocks SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGTSTP during its lifetime and delivers them through a signalfd.
/// Ignores SIGPIPE. SIGHUP stays ignored if it was (nohup). Child processes must unblock the signals. Threads must be
/// started after this object is constructed, so that they inherit the signal mask.
class Signals {
 public:
  Signals();
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  /// Readable if next() has a signal.
  int fd() const { return file_.get(); }
  std::optional<int> next();
  /// Returns the next signal; blocks for up to `limit`.
  std::optional<int> wait_for(std::chrono::milliseconds limit);
  /// Returns whether next() has returned a signal other than SIGTSTP.
  bool is_stop_requested() const { return is_stop_requested_; }

 private:
  sigset_t before_;
  struct sigaction pipe_before_;
  FileDescriptor file_;
  bool is_stop_requested_ = false;
};

}  // namespace lockstep
