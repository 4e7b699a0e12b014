#pragma once

#include <cstddef>
#include <deque>
#include <string>

namespace lockstep {

/// This process's stdout and stderr, written in the order given and without ever keeping the launcher waiting: a reader
/// that is slow, or a terminal that is held, must not delay the watching over workers. One thread at a time.
class Console {
 public:
  enum class Stream { kOut = 1, kErr = 2 };

  Console();

  /// Whole lines.
  void put(Stream stream, const std::string& lines);

  /// The file that it would write to next, to be polled; -1 when all is written.
  int waits_for() const { return queue_.empty() ? -1 : static_cast<int>(queue_.front().stream); }
  /// Writes some, when that file takes it now.
  void write_some();
  /// Writes all. Lines for a stream that takes none are dropped as soon as `interrupt` is readable, or when `is_urgent`
  /// after a second; those for the other stream are written.
  void flush(int interrupt, bool is_urgent = false);
  /// Whether so much is unwritten that workers should wait.
  bool is_full() const { return unwritten_ > (4u << 20); }

  /// Whether lines on that stream may be coloured: it is a terminal, and NO_COLOR is not set.
  bool has_colour(Stream stream) const { return has_colour_[static_cast<int>(stream)]; }

 private:
  void drop(Stream stream);

  struct Part {
    Stream stream;
    std::string bytes;
    size_t written = 0;
  };

  std::deque<Part> queue_;
  size_t unwritten_ = 0;
  bool has_colour_[3] = {};  // constant after construction
};

}  // namespace lockstep
