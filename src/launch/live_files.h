#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launch/launch_plan.h"

namespace lockstep {

/// The last lines of a worker's output, and which of them its file has. Not thread-safe.
class OutputTail {
 public:
  static constexpr size_t kMaxBytes = 128 << 10;

  /// Adds a line. If there are more than kMaxBytes, drops the older half.
  void add(const std::string& line);

  struct Change {
    bool is_whole = false;  // the bytes replace the file, else they are appended
    std::string bytes;
  };
  /// Returns the change since the last call; none if there is none.
  std::optional<Change> take_change();
  /// The next change is the whole file, because the file may differ.
  void forget_file() { has_file_ = false; }

 private:
  std::string kept_;
  size_t in_file_ = 0;  // bytes of kept_ that the file has
  bool has_file_ = false;
};

/// Writes live/node-NNN.json and live/output-NNNNN.log of the training run of this node's workers
/// (docs/file_formats.md), about once a second and when a worker ends. The workers note the folder of their run in a
/// file; until then the output is only kept.
///
/// The launcher never waits for these files: a background thread writes them, and while it is busy, changes collect. If
/// a file cannot be written, one warning is logged, and the next write tries again. Not thread-safe.
class LiveFiles {
 public:
  struct Worker {
    int rank = 0;
    int local_rank = 0;
    int pid = 0;
    bool has_ended = false;
    bool has_failed = false;
    std::string description{};
    double seconds = 0;
    std::string uncaught{};
  };
  using Clock = std::chrono::steady_clock;

  LiveFiles(std::vector<std::string> command, const Plan& plan);
  /// Writes that the job has ended, if end() was not called. Waits for the files for up to 2 s.
  ~LiveFiles();
  LiveFiles(const LiveFiles&) = delete;
  LiveFiles& operator=(const LiveFiles&) = delete;

  /// Begins an attempt.
  void begin(const Layout& layout);
  OutputTail& output(int rank) { return outputs_[rank]; }

  /// When to call update() again.
  Clock::time_point due() const { return due_; }
  /// Reads the folder of the run from the note, if the file exists, and writes the files.
  void update(const std::string& note_file, std::vector<Worker> workers);
  /// Writes that the job has ended, with its report (report_to_json). Waits for the files for up to 2 s.
  void end(const std::string& report);

 private:
  struct Writer;
  struct Batch;

  void read_note(const std::string& note_file);
  bool write();
  void write_last();
  std::string node_to_json() const;

  const std::vector<std::string> command_;
  const std::string job_id_;
  const NodePlace node_;
  const double started_;
  const std::shared_ptr<Writer> writer_;  // shared with its thread, which may outlive this object
  Layout layout_{};
  std::string folder_;  // live/; empty until it is known
  bool is_new_folder_ = false;
  std::vector<Worker> workers_;
  std::map<int, OutputTail> outputs_;  // by rank
  Clock::time_point due_;
  bool has_ended_ = false;
  std::string report_;
};

}  // namespace lockstep
