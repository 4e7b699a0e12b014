#pragma once

#include <signal.h>

#include <chrono>
#include <optional>

#include "rendezvous/net/socket.h"

namespace lockstep {

/// For as long as the object lives, the signals that a launcher acts upon come through a file: INT, TERM, HUP, USR1 and
/// TSTP. Those started meanwhile must unblock them. Threads that are to be spared must be started after it.
class Signals {
 public:
  Signals();
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  /// Readable when next() has one.
  int fd() const { return file_.get(); }
  std::optional<int> next();
  /// The next, waiting for it so long.
  std::optional<int> wait_for(std::chrono::milliseconds limit);
  /// Whether next() has given one that asks this process to stop, which all do but TSTP.
  bool stop_was_asked() const { return stop_was_asked_; }

 private:
  sigset_t before_;
  struct sigaction pipe_before_;
  FileDescriptor file_;
  bool stop_was_asked_ = false;
};

}  // namespace lockstep
