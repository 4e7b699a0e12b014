#pragma once

#include <cstddef>
#include <deque>
#include <optional>
#include <string>

namespace lockstep {

/// Writes to this process's stdout and stderr, in order and without blocking: a slow reader or a paused terminal must
/// not delay the supervision of the workers. Not thread-safe.
class Console {
 public:
  enum class Stream { kOut = 1, kErr = 2 };

  Console();

  /// Queues complete lines. On a terminal they appear above the progress bar that is shown; lines of the bar's `owner`
  /// replace the bar.
  void put(Stream stream, const std::string& lines, const void* owner = nullptr);
  /// Queues the state of the progress bar of `owner`. A terminal shows one bar, on its last line: the bar that was put
  /// last. Other streams get the state as a line.
  void put_progress(Stream stream, const std::string& prefix, const std::string& state, const void* owner);

  /// The file descriptor that the next write needs, for poll(); -1 if the queue is empty.
  int waits_for() const { return queue_.empty() ? -1 : static_cast<int>(queue_.front().stream); }
  /// Writes up to PIPE_BUF bytes. Call it when waits_for() is writable.
  void write_some();
  /// Blocks until the queue is empty. If a stream accepts no bytes, its lines are dropped as soon as `interrupt` is
  /// readable or, if `is_urgent`, after 1 s; the lines of the other stream are still written.
  void flush(int interrupt, bool is_urgent = false);
  /// Returns whether more than 4 MiB are queued, so that reading from the workers should pause.
  bool is_full() const { return unwritten_ > (4u << 20); }

  /// Returns whether the stream is a terminal with colours: NO_COLOR is not set and TERM is not "dumb".
  bool has_colour(Stream stream) const { return has_colour_[static_cast<int>(stream)]; }
  bool is_terminal(Stream stream) const { return is_terminal_[static_cast<int>(stream)]; }
  /// Returns the width of the stream's terminal.
  int columns(Stream stream) const;

 private:
  void drop(Stream stream);
  void queue(Stream stream, const std::string& bytes);
  void draw_progress();

  struct Progress {
    Stream stream;
    std::string prefix, state;
    const void* owner;
  };
  struct Part {
    Stream stream;
    std::string bytes;
    size_t written = 0;
  };

  std::deque<Part> queue_;
  size_t unwritten_ = 0;
  bool has_colour_[3] = {};           // constant after construction
  bool is_terminal_[3] = {};          // constant after construction
  std::optional<Progress> progress_;  // the terminal's last line, without a newline
};

}  // namespace lockstep
