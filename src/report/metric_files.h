#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/metric_log.h>
#include <lockstep/tensorboard_writer.h>
#include <lockstep/training_run.h>

#include "base/file_descriptor.h"

namespace lockstep::detail {

/// One line of metrics.jsonl.
struct MetricRecord {
  bool is_epoch = false;
  int64_t step = 0;
  double epoch = 0;  // epochs completed
  double seconds = 0;
  std::map<std::string, double> values{};
};

std::string to_json(const MetricRecord& record);
/// Throws UsageError if the line is no record.
MetricRecord from_json(const std::string& line);

/// A file to which whole lines are appended. After a failure, for example on a full disk, it logs one warning and tries
/// again with the next line, so that a line is either complete or missing.
class LineFile {
 public:
  /// Replaces the file's content by `content` and opens it. Throws SystemError, or UsageError if it is not this user's
  /// file.
  LineFile(std::string path, const std::string& content);
  void append(const std::string& line);

 private:
  const std::string path_;
  FileDescriptor file_;
  int64_t length_ = 0;  // of the complete lines
  bool has_warned_ = false;
};

/// Throws UsageError if files of the folder that a MetricFiles reads or replaces are not this user's regular files.
void check_own_files(const std::string& folder);

/// The files of a MetricLog. Used by rank 0. Not thread-safe, except tensorboard().
class MetricFiles {
 public:
  /// Opens the files of the folder. Keeps step records up to step `steps` and records of the first `epochs` epochs,
  /// after which the run continues, and removes other records. Throws SystemError or UsageError if metrics.jsonl cannot
  /// be read or written; logs a warning if another file cannot.
  MetricFiles(std::string folder, const MetricLogOptions& options, int64_t steps, int64_t epochs);
  void write(const MetricRecord& record);
  TensorBoardWriter* tensorboard() { return tensorboard_.get(); }

 private:
  void write_table();
  std::string csv_table() const;
  std::string csv_row(const MetricRecord& record) const;
  bool add_columns(const MetricRecord& record);

  const std::string folder_;
  const MetricLogOptions options_;
  std::unique_ptr<LineFile> jsonl_, csv_;
  std::unique_ptr<TensorBoardWriter> tensorboard_;
  std::vector<std::string> columns_{};  // of metrics.csv, in the order of their first value
};

/// A run that has ended.
struct RunSummary {
  bool is_complete = true;  // otherwise it was stopped early
  int64_t epochs = 0, steps = 0;
  int world_size = 1;
  int64_t samples = 0;
  double seconds = 0;  // of training on the samples
  std::map<std::string, double> metrics{};
};

/// Writes summary.json. Logs a warning if that fails.
void write_summary(const std::string& path, const RunSummary& summary);

/// Writes settings.json, or removes it if there are no settings. Logs a warning if that fails.
void write_settings(const std::string& path, const std::map<std::string, RunSetting>& settings);

}  // namespace lockstep::detail
