#pragma once

#include <sys/types.h>

#include <filesystem>
#include <mutex>
#include <string>

#include "live/records.h"
#include "live/run_folder.h"

namespace lockstep::ui {

using live::Records;

/// Follows a metrics.jsonl that may grow, shrink or be replaced, and keeps its records. Thread-safe: one thread reads
/// the file while other threads access the records that have been read so far.
class MetricsReader {
 public:
  /// The file is in the folder of a run, whose path is canonical.
  MetricsReader(std::filesystem::path run, std::string name) : run_(std::move(run)), name_(std::move(name)) {}

  /// Reads the bytes that were appended since the last call, or the whole file if it was replaced or is smaller. Calls
  /// `keep_going` between pieces, and returns early if that returns false. Returns whether the records have changed.
  template <class KeepGoing>
  bool read_more(const KeepGoing& keep_going) {
    bool has_changed = false;
    while (keep_going() && read_piece(has_changed)) {
    }
    return has_changed;
  }

  /// Calls `visit(records)` while no records are added.
  template <class Visit>
  auto with_records(const Visit& visit) const {
    const std::lock_guard lock(mutex_);
    return visit(records_);
  }

  /// Why the file cannot be read; empty if it can be read, or does not exist.
  std::string problem() const;

 private:
  bool read_piece(bool& has_changed);
  bool take_piece(bool& has_changed);
  bool is_continued(const live::OpenFile& opened) const;
  void begin_again();
  void append(size_t count, bool at_end);

  const std::filesystem::path run_;
  const std::string name_;
  mutable std::mutex mutex_;
  Records records_;      // guarded by mutex_
  std::string problem_;  // guarded by mutex_

  // Used by the reading thread only.
  dev_t device_ = 0;
  ino_t number_ = 0;
  size_t offset_ = 0;             // of the file: `rest_` is before it
  std::string rest_;              // the beginning of an incomplete line
  std::string last_bytes_;        // before `offset_`, to notice a file that was written again
  bool is_line_skipped_ = false;  // up to the end of a line that is too long
};

}  // namespace lockstep::ui
