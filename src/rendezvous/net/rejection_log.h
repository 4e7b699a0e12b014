#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/text.h"

namespace lockstep {

/// Logs rejected connections, at most once per second, so that a flood of connections does not flood the log. Never
/// blocks.
class RejectionLog {
 public:
  /// `subject` is the subject of the log lines: "the store", "rank 3".
  explicit RejectionLog(std::string subject) : subject_(std::move(subject)) {}

  void count(const std::string& peer, const std::string& why, std::chrono::steady_clock::time_point now) {
    ++since_last_line_;
    if (now - last_line_ < std::chrono::seconds(1)) return;
    log_warning_async(
        text(subject_, " rejected a connection from ", peer, ": ", why,
             since_last_line_ > 1 ? text(" (and ", since_last_line_ - 1, " more since the last such line)") : ""));
    last_line_ = now;
    since_last_line_ = 0;
  }

 private:
  const std::string subject_;
  std::chrono::steady_clock::time_point last_line_{};
  int64_t since_last_line_ = 0;
};

}  // namespace lockstep
