#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>

#include "ui/metrics_reader.h"
#include "ui/run_facts.h"

namespace lockstep::ui {

/// A run that the dashboard shows.
class Run {
 public:
  /// The path is canonical.
  Run(int id, std::filesystem::path folder);

  int id() const { return id_; }
  const std::filesystem::path& folder() const { return folder_; }
  const MetricsReader& metrics() const { return metrics_; }
  /// Increases when the records change.
  uint64_t version() const { return version_; }

  /// The description of the run for the page; docs/monitoring.md has its keys.
  nlohmann::json description() const;
  /// The ranks, as live::to_json describes them; "null" if the run has no live files.
  std::string live() const;

 private:
  friend class RunCatalog;

  struct Look {
    bool has_changed = false;     // anything that description() returns, except the records
    std::string metrics_stamp{};  // of the file with the records
  };

  Look read_files(double now);
  bool read_live(const live::RunFolder& folder, double now);
  std::string state(const live::RunFolder& folder, double now) const;
  nlohmann::json results() const;

  const int id_;
  const std::filesystem::path folder_;
  MetricsReader metrics_;
  std::atomic<uint64_t> version_ = 1;
  std::atomic<bool> is_queued_ = false, is_read_ = false;  // is_read_: all records of the file were read once
  std::string metrics_stamp_;                              // used by the watching thread only

  mutable std::mutex mutex_;
  std::string name_;                // guarded by mutex_
  bool exists_ = true;              // guarded by mutex_
  JsonFile settings_, summary_;     // guarded by mutex_
  nlohmann::json live_ = nullptr;   // guarded by mutex_
  std::string live_stamp_, state_;  // guarded by mutex_
  double modified_ = 0;             // guarded by mutex_: time of the last change of records or live files
  std::vector<std::string> links_;  // guarded by mutex_: folders that are links
};

/// All runs below some folders. A thread looks for changes several times a second, and other threads read the records,
/// so that no request waits for a file. Thread-safe.
class RunCatalog {
 public:
  /// Resolves links in the paths of the folders once: a link that is changed later is not followed. Throws
  /// std::filesystem::filesystem_error if a folder does not exist.
  explicit RunCatalog(const std::vector<std::filesystem::path>& folders);
  ~RunCatalog();
  RunCatalog(const RunCatalog&) = delete;
  RunCatalog& operator=(const RunCatalog&) = delete;

  std::vector<std::shared_ptr<const Run>> runs() const;
  /// Null if there is no such run.
  std::shared_ptr<const Run> find(int id) const;

  /// Increases when anything that `descriptions` returns has changed.
  uint64_t version() const { return version_; }
  /// {"runs": [...], "reading": bool, "has_skipped_links": bool}: the data that the page requests once a second.
  nlohmann::json descriptions() const;

 private:
  void watch();
  void look_for_runs();
  void look_for_changes();
  void read_metrics();
  void publish(Run& run);
  void name_runs();

  const std::vector<std::filesystem::path> folders_;  // canonical paths
  std::atomic<uint64_t> version_ = 1;
  std::atomic<bool> is_stopping_ = false;

  mutable std::mutex mutex_;
  std::condition_variable changed_;                             // the queue, or is_stopping_
  std::map<std::filesystem::path, std::shared_ptr<Run>> runs_;  // guarded by mutex_
  bool has_skipped_links_ = false;                              // guarded by mutex_
  std::deque<std::shared_ptr<Run>> queue_;                      // guarded by mutex_: runs with new records
  std::vector<std::thread> threads_;                            // constant after construction
};

}  // namespace lockstep::ui
