#pragma once

#include <mutex>
#include <string>
#include <vector>

#include <lockstep/logging.h>

/// Collects the library's log lines during its lifetime; they are not written to stderr.
class LogLines {
 public:
  LogLines() {
    lockstep::set_log_sink([this](lockstep::LogLevel, const std::string& line) {
      std::lock_guard lock(mutex_);
      lines_.push_back(line);
    });
  }
  ~LogLines() { lockstep::set_log_sink({}); }

  std::vector<std::string> lines() const {
    std::lock_guard lock(mutex_);
    return lines_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> lines_;  // guarded by mutex_
};
