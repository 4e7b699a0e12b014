#include <lockstep/logging.h>

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>

#include <spdlog/logger.h>
#include <spdlog/sinks/stdout_color_sinks.h>

#include <lockstep/environment.h>
#include <lockstep/error.h>

#include "base/live_line.h"
#include "base/log.h"
#include "base/start_thread.h"
#include "base/text.h"

namespace lockstep {
namespace {

struct LevelName {
  LogLevel level;
  std::string_view name;
  spdlog::level::level_enum spdlog_level;
};

constexpr std::array<LevelName, 5> kLevels{{{LogLevel::kDebug, "debug", spdlog::level::debug},
                                            {LogLevel::kInfo, "info", spdlog::level::info},
                                            {LogLevel::kWarning, "warning", spdlog::level::warn},
                                            {LogLevel::kError, "error", spdlog::level::err},
                                            {LogLevel::kOff, "off", spdlog::level::off}}};

std::optional<LogLevel> level_named(std::string_view name) {
  for (const auto& known : kLevels)
    if (known.name == name) return known.level;
  return std::nullopt;
}

spdlog::color_mode color_mode() {
  const char* no_color = std::getenv("NO_COLOR");
  const bool refused = no_color != nullptr && *no_color != '\0';
  return refused ? spdlog::color_mode::never : spdlog::color_mode::automatic;
}

/// Evaluated for every line, because a forked process gets its rank after the fork.
std::string process_name() {
  try {
    const auto environment = Environment::detect();
    if (environment.source != Environment::kSingleProcess) return text("lockstep rank ", environment.rank);
  } catch (const UsageError&) {
    // Code that needs the rank reports this error. Logging must not fail.
  }
  return "lockstep";
}

class Log {
 public:
  Log() : stderr_(std::make_shared<spdlog::sinks::stderr_color_sink_mt>(color_mode())) {
    stderr_->set_pattern("[%n] %^%l%$: %v");
    const char* wanted = std::getenv("LOCKSTEP_LOG");
    if (wanted == nullptr) return;
    if (const auto level = level_named(wanted)) {
      level_ = *level;
    } else {
      write_stderr(LogLevel::kWarning, text("LOCKSTEP_LOG is \"", wanted,
                                            "\": it must be debug, info, warning, error or off; using warning"));
    }
  }

  LogLevel level() const { return level_; }
  void set_level(LogLevel level) { level_ = level; }

  void set_sink(std::function<void(LogLevel, const std::string&)> sink) {
    auto replacement = sink ? std::make_shared<const Sink>(std::move(sink)) : nullptr;
    std::lock_guard lock(mutex_);
    sink_.swap(replacement);
  }

  void write(LogLevel level, const std::string& message) {
    if (level < level_) return;
    std::lock_guard lock(mutex_);
    if (const auto sink = sink_) {  // a copy: the sink may replace itself
      try {
        return (*sink)(level, message);
      } catch (...) {
        // Logging must not fail; the line is written to stderr below.
      }
    }
    write_stderr(level, message);
  }

 private:
  using Sink = std::function<void(LogLevel, const std::string&)>;

  /// Creates a logger per line, because the name of a spdlog logger is fixed and contains the rank.
  void write_stderr(LogLevel level, const std::string& message) {
    spdlog::logger logger(process_name(), stderr_);
    logger.set_level(spdlog::level::trace);
    LiveLine::Pause pause(STDERR_FILENO);
    logger.log(kLevels[static_cast<size_t>(level)].spdlog_level, spdlog::string_view_t(message));
  }

  const std::shared_ptr<spdlog::sinks::stderr_color_sink_mt> stderr_;  // constant after construction
  std::atomic<LogLevel> level_{LogLevel::kWarning};
  std::recursive_mutex mutex_;        // recursive: a sink may call functions that log
  std::shared_ptr<const Sink> sink_;  // guarded by mutex_; null: stderr
};

/// Never destroyed: destructors of the program's static objects may still log.
Log& process_log() {
  static Log& log = *new Log;
  return log;
}

/// Lines that wait to be written. A background thread exists only while there are some.
class WaitingLines {
 public:
  void add(std::string line) {
    std::lock_guard lock(mutex_);
    if (lines_.size() >= kMaxLines) return void(++dropped_);
    lines_.push_back(std::move(line));
    if (std::exchange(is_writing_, true)) return;
    try {
      run_in_background("writing the log", [this] { write_all(); });
    } catch (const SystemError&) {  // no thread: later lines try again
      is_writing_ = false;
    }
  }

 private:
  static constexpr size_t kMaxLines = 100;

  void write_all() {
    while (auto line = take()) log_warning(*line);
  }

  std::optional<std::string> take() {
    std::lock_guard lock(mutex_);
    if (lines_.empty() && dropped_ > 0) return text(std::exchange(dropped_, 0), " lines of the log were dropped");
    if (lines_.empty()) {
      is_writing_ = false;
      return std::nullopt;
    }
    auto line = std::move(lines_.front());
    lines_.pop_front();
    return line;
  }

  std::mutex mutex_;
  std::deque<std::string> lines_;  // guarded by mutex_
  int64_t dropped_ = 0;            // guarded by mutex_
  bool is_writing_ = false;        // guarded by mutex_
};

}  // namespace

void log_warning_async(std::string message) {
  static WaitingLines& lines = *new WaitingLines;  // never destroyed, as the log
  lines.add(std::move(message));
}

void set_log_level(LogLevel level) {
  process_log().set_level(level);
}

LogLevel log_level() {
  return process_log().level();
}

void set_log_sink(std::function<void(LogLevel level, const std::string& message)> sink) {
  process_log().set_sink(std::move(sink));
}

void log_debug(const std::string& message) {
  process_log().write(LogLevel::kDebug, message);
}

void log_info(const std::string& message) {
  process_log().write(LogLevel::kInfo, message);
}

void log_warning(const std::string& message) {
  process_log().write(LogLevel::kWarning, message);
}

void log_error(const std::string& message) {
  process_log().write(LogLevel::kError, message);
}

}  // namespace lockstep
