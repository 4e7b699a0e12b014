#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/owner_process.h"

namespace lockstep {

/// The line at the bottom of the terminal that is redrawn in place, for example a progress bar. There is one terminal
/// and therefore one object per process. It keeps the live line and the other output of lockstep apart: a Pause erases
/// the line while something else is written. All functions are thread-safe. Errors of writing are ignored, as std::cout
/// does. A process that ends by exit() or std::terminate() leaves a complete line.
class LiveLine {
 public:
  /// How a line on standard output is overwritten.
  enum class Style {
    kNone,
    kEscapes,  // a terminal: carriage return, and the escape sequence that erases the rest of a line
    kSpaces,   // a terminal without escape sequences: carriage return, and spaces
    kReturn    // a pipe to a launcher that shows lines in place: the line, then a carriage return
  };

  /// Never destroyed. A forked child has an object of its own, without a line.
  static LiveLine& of_process();

  /// Gives `owner` a line. The line of the owner that began last is shown; the lines below wait for its end.
  void begin(const void* owner, Style style);
  /// Replaces the owner's line, which takes `columns` columns of one row. Never blocks: nothing is drawn if the
  /// terminal is paused, if this process is not in the foreground, or if another thread is writing.
  void show(const void* owner, std::string line, size_t columns);
  /// Removes the owner's line.
  void end(const void* owner);

  class Pause;

 private:
  struct Line {
    const void* owner;
    std::string text;
    size_t columns = 0;
  };

  bool overlaps_line(int file) const;
  void draw();
  void erase();
  void complete_line();
  static void complete_at_exit();
  [[noreturn]] static void complete_at_terminate();

  const OwnerProcess owner_process_{};      // constant after construction
  std::atomic<Style> style_{Style::kNone};  // kNone: no owner. Written under mutex_
  std::mutex mutex_;
  std::vector<Line> lines_;   // guarded by mutex_; the last one is shown
  size_t drawn_columns_ = 0;  // guarded by mutex_; width of the line in the terminal; 0: no line
};

/// Erases the live line during its lifetime, if output to `file` (STDOUT_FILENO or STDERR_FILENO) would be written over
/// it. Without a live line it costs a few loads. Do not log or print on the same thread meanwhile.
class LiveLine::Pause {
 public:
  explicit Pause(int file);
  ~Pause();
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;

 private:
  LiveLine& line_;
  std::unique_lock<std::mutex> lock_;  // owned: the line is erased
};

/// Writes all bytes to a file descriptor, and waits if it is not ready. Returns false if that fails.
bool write_fully(int file, std::string_view bytes);

}  // namespace lockstep
