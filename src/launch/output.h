#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "launch/console.h"
#include "launch/launch_plan.h"
#include "rendezvous/net/socket.h"

namespace lockstep {

/// Cuts bytes into whole lines; what has no end yet stays.
class LineCutter {
 public:
  static constexpr size_t kLongest = 1 << 20;  // a longer line is cut: it would never be shown

  /// The whole lines that are complete now, without their ends.
  std::vector<std::string> feed(std::string_view bytes);
  /// What is left, when nothing more will come; empty when nothing is.
  std::string take_rest();

 private:
  std::string partial_;
};

/// What the launcher remembers of a worker's stderr.
class StderrMemory {
 public:
  static constexpr size_t kLines = 20;

  void add(const std::string& line);
  const std::deque<std::string>& tail() const { return tail_; }
  /// What an exception that nobody caught said, with its type: "std::runtime_error: no data". Empty: there was none.
  std::string uncaught() const;

 private:
  std::deque<std::string> tail_;
  std::string type_, what_;
};

/// One stream of a worker: from its pipe to the console, with a prefix on each line, and to its file, as it is.
class StreamOutput {
 public:
  struct Options {
    Console::Stream stream;
    OutputRoute route;
    std::string prefix;  // "[2] "
    int colour = 0;      // of the terminal's, for the prefix
    std::string path;    // of the file, when the route has one
    StderrMemory* memory = nullptr;
  };

  /// SystemError when the file cannot be written.
  StreamOutput(FileDescriptor pipe, Options options, Console* console);

  /// -1 when the other end is closed.
  int fd() const { return pipe_.get(); }
  /// Passes on what has come; whether something had.
  bool read_some();
  /// Passes on what is left, without waiting, and closes the pipe. A last line without an end gets one.
  void finish();

 private:
  bool pass_on();
  void show(const std::vector<std::string>& lines);

  FileDescriptor pipe_, file_;
  const Options options_;
  const std::string prefix_;  // with colour
  Console* const console_;
  LineCutter cutter_;
};

}  // namespace lockstep
