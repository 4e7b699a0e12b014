#pragma once

#include <termios.h>

#include <chrono>
#include <csignal>
#include <string>
#include <vector>

#include "base/file_descriptor.h"
#include "top/styled_line.h"

namespace lockstep::top {

/// The terminal as a full screen: the alternate screen without a cursor, and keys without echo. The destructor restores
/// the terminal. SIGINT, SIGTERM, SIGHUP and SIGQUIT are blocked meanwhile and become events, so that they restore the
/// terminal, too; so is SIGTSTP (Ctrl-Z), which restores the terminal while the process is stopped. Not thread-safe;
/// one object per process.
class FullScreen {
 public:
  /// Throws SystemError if standard input and output are not a terminal.
  FullScreen();
  ~FullScreen();
  FullScreen(const FullScreen&) = delete;
  FullScreen& operator=(const FullScreen&) = delete;

  /// The result of wait().
  struct Event {
    std::string keys{};       // bytes from the keyboard
    bool is_resized = false;  // or the terminal was restored after a stop
    int end_signal = 0;       // a signal that ends the program, or SIGHUP if the terminal is gone; else 0
  };

  /// Waits for a key, a signal or the end of the time.
  Event wait(std::chrono::milliseconds limit);

  /// The size of the terminal, at least 1 by 1, and at most 1000 by 1000.
  Style size(Style style) const;

  /// Shows the lines from the top of the screen on. Nothing is drawn while the terminal does not accept output
  /// (Ctrl-S). Returns false if the terminal is gone.
  bool draw(const std::vector<std::string>& lines);

 private:
  void enter();
  void leave();
  void read_signals(Event& event);

  termios saved_termios_{};   // constant after construction
  sigset_t saved_mask_{};     // constant after construction
  FileDescriptor signals_{};  // constant after construction
};

}  // namespace lockstep::top
