#pragma once

#include <chrono>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "launch/console.h"
#include "launch/launch_plan.h"
#include "launch/live_files.h"
#include "rendezvous/net/socket.h"

namespace lockstep {

/// Splits bytes into lines. An incomplete line is kept for the next call. A progress bar writes carriage returns, after
/// which the terminal overwrites the line: a line is the text that a terminal would show at the end.
class LineCutter {
 public:
  static constexpr size_t kLongest = 1 << 20;  // longer lines are split, so that they are shown at all

  /// Returns the lines that are complete now, without newlines.
  std::vector<std::string> feed(std::string_view bytes);
  /// Returns the current state of an incomplete line that has carriage returns; empty if there is none.
  std::string progress() const;
  /// Returns the incomplete last line, if any, and clears it.
  std::string take_rest();

 private:
  std::string partial_;
};

/// Keeps the last lines of a worker's stderr and the message of an uncaught exception, for the report.
class StderrMemory {
 public:
  static constexpr size_t kLines = 20;

  void add(const std::string& line);
  const std::deque<std::string>& tail() const { return tail_; }
  /// The type and message of an uncaught exception: "std::runtime_error: no data". Empty if there was none.
  std::string uncaught() const;

 private:
  std::deque<std::string> tail_;
  std::string type_, what_;
};

/// Forwards one stream of a worker from its pipe: to the console with a prefix on each line, and unchanged to a file.
class StreamOutput {
 public:
  struct Options {
    Console::Stream stream;
    OutputRoute route;
    std::string prefix;  // "[2] "
    int colour = 0;      // of the prefix, modulo the number of colours
    std::string path;    // of the file, if route.to_file
    StderrMemory* memory = nullptr;
    OutputTail* tail = nullptr;
  };

  /// Creates the file. Throws SystemError if it cannot be written.
  StreamOutput(FileDescriptor pipe, Options options, Console* console);

  /// -1 if the other end is closed.
  int fd() const { return pipe_.get(); }
  /// Forwards the available bytes. Returns whether there were any.
  bool read_some();
  /// Forwards the remaining bytes without blocking, and closes the pipe. Adds a newline to an incomplete last line.
  void finish();

 private:
  bool forward_output();
  void show(const std::vector<std::string>& lines);
  void show_progress();

  FileDescriptor pipe_, file_;
  const Options options_;
  const std::string prefix_;  // with colour
  Console* const console_;
  LineCutter cutter_;
  std::string progress_;  // the state that was shown last
  std::chrono::steady_clock::time_point progress_shown_{};
};

}  // namespace lockstep
