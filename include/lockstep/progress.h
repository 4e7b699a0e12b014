#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include <lockstep/export.h>
#include <lockstep/process_group.h>

namespace lockstep {

struct ProgressOptions {
  /// kTerminal: a live line, which is redrawn in place. kLines: plain lines, without escape sequences. kOff: nothing.
  /// kAuto: a live line if standard output is a terminal, or if `lockstep run` shows it in one; plain lines otherwise.
  enum class Output { kAuto, kTerminal, kLines, kOff };

  Output output = Output::kAuto;
  /// For plain lines: the least time between two lines. The line at the end of a bar is always written.
  std::chrono::milliseconds line_interval{5000};
};

/// Shows on rank 0 how far a loop is:
///
///     epoch 3/20  120/469  ━━━━━╸──────────────  26 %  loss 0.4321  lr 0.1  12.3k samples/s  data 3 %  eta 0:41
///
///     Progress progress(world);
///     for (int epoch = 1; epoch <= 20; ++epoch) {
///       progress.begin("epoch " + std::to_string(epoch) + "/20", steps_per_epoch);
///       for (auto& batch : loader) {
///         ...
///         progress.set("loss", loss);
///         progress.advance();
///       }
///       progress.end();
///     }
///
/// A live line fits into one row of the terminal: if it is too long, the bar shrinks and less important parts are
/// dropped. Rates and the time left (eta) are those of recent time. lockstep::print() and the lines of lockstep's log
/// appear above the live line; write other output with lockstep::print(). If several bars run in a process, the one
/// that began last is shown.
///
/// Not collective. Ranks other than 0 show nothing. Not thread-safe: use an object on one thread at a time. In a forked
/// child the object does nothing. All output goes to standard output; errors of writing are ignored. An update never
/// blocks, so a terminal that is paused (Ctrl-S) does not stop the training; print(), end() and plain lines do block.
class LOCKSTEP_EXPORT Progress {
 public:
  /// Throws UsageError if line_interval is negative or if the variable LOCKSTEP_TERMINAL is invalid.
  explicit Progress(const ProcessGroup& group, ProgressOptions options = {});
  /// Ends the bar, also if an exception is thrown: the terminal is left with a complete line.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Starts a bar of `total` steps; 0 if the number is unknown. `done` of them were made before, for example before a
  /// resume; they do not count for rates. Ends the current bar first. Throws UsageError if a number is negative.
  void begin(std::string title, int64_t total = 0, int64_t done = 0);
  /// Call after each step. Updates the line at most 10 times a second, and takes less than a microsecond otherwise.
  /// Throws UsageError if there is no bar, or if `steps` is negative.
  void advance(int64_t steps = 1);
  /// Adds samples of all ranks: the line then shows samples per second instead of steps. Those of several steps may be
  /// added at once.
  void add_samples(int64_t samples);
  /// Adds time that this rank waited for data. The line shows its part of the whole time: "data 3 %".
  void add_waiting(std::chrono::nanoseconds waited);
  /// Sets a value that the line shows after its name: "loss 0.4321". Values are shown in the order of the first set(),
  /// and stay until they are set again, also in later bars. When space is short, the first value is kept longest.
  void set(std::string_view name, double value);
  /// Ends the bar. A line stays: the summary or, if that is empty, the last state with the average rates and the time
  /// that the bar took. Does nothing if there is no bar.
  void end(std::string_view summary = {});

 private:
  class Impl;

  [[noreturn]] void refuse_steps(int64_t steps) const;

  std::unique_ptr<Impl> impl_;  // null: this rank shows nothing
  bool has_bar_ = false;        // on every rank, so that misuse is an error on all of them
};

}  // namespace lockstep
