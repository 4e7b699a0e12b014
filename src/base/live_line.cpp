#include "base/live_line.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <exception>
#include <memory>
#include <utility>

namespace lockstep {
namespace {

std::atomic<LiveLine*> line_of_process{nullptr};

// The handler that std::terminate() called before the first line began.
std::atomic<std::terminate_handler> previous_terminate{nullptr};

bool is_writable(int file) {
  pollfd ready{file, POLLOUT, 0};
  return ::poll(&ready, 1, 0) == 1 && (ready.revents & POLLOUT) != 0;
}

/// Returns false for a job that the shell has put into the background: its line would overwrite the user's input.
bool is_in_foreground() {
  const pid_t foreground = ::tcgetpgrp(STDOUT_FILENO);
  return foreground < 0 || foreground == ::getpgrp();  // negative: not the terminal that controls this process
}

}  // namespace

bool write_fully(int file, std::string_view bytes) {
  while (!bytes.empty()) {
    const auto count = ::write(file, bytes.data(), bytes.size());
    if (count > 0) {
      bytes.remove_prefix(static_cast<size_t>(count));
    } else if (count < 0 && errno == EAGAIN) {
      pollfd ready{file, POLLOUT, 0};
      ::poll(&ready, 1, -1);
    } else if (count == 0 || errno != EINTR) {
      return false;
    }
  }
  return true;
}

// Lock-free, because another thread of the parent may have been in this function when this process was forked.
LiveLine& LiveLine::of_process() {
  LiveLine* line = line_of_process.load();
  while (line == nullptr || !line->owner_process_.is_this()) {
    auto fresh = std::make_unique<LiveLine>();
    if (!line_of_process.compare_exchange_strong(line, fresh.get())) continue;
    if (line != nullptr) abandon(line);
    line = fresh.release();
  }
  return *line;
}

void LiveLine::begin(const void* owner, Style style) {
  std::lock_guard lock(mutex_);
  if (lines_.empty() && style != Style::kReturn) {
    static std::once_flag once;
    std::call_once(once, [] { std::atexit(complete_at_exit); });
    if (std::get_terminate() != complete_at_terminate) previous_terminate = std::set_terminate(complete_at_terminate);
  }
  erase();
  lines_.push_back({owner, {}});
  style_ = style;
}

void LiveLine::show(const void* owner, std::string line, size_t columns) {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  for (auto& own_line : lines_) {
    if (own_line.owner != owner) continue;
    own_line.text = std::move(line);
    own_line.columns = columns;
    if (&own_line == &lines_.back() && is_writable(STDOUT_FILENO)) draw();
    return;
  }
}

void LiveLine::end(const void* owner) {
  std::lock_guard lock(mutex_);
  erase();
  std::erase_if(lines_, [&](const Line& line) { return line.owner == owner; });
  draw();
  if (!lines_.empty()) return;
  style_ = Style::kNone;
  if (std::get_terminate() == complete_at_terminate) std::set_terminate(previous_terminate);
}

// If stderr and stdout are terminals, they are the same terminal. A launcher reads each of them from its own pipe and
// keeps them apart.
bool LiveLine::overlaps_line(int file) const {
  const auto style = style_.load();
  if (style == Style::kNone || file == STDOUT_FILENO) return style != Style::kNone;
  return style != Style::kReturn && ::isatty(file) != 0;
}

void LiveLine::draw() {
  if (lines_.empty() || lines_.back().columns == 0) return;
  const auto& [owner, text, columns] = lines_.back();
  const auto style = style_.load();
  if (style == Style::kReturn) {
    write_fully(STDOUT_FILENO, text + "\r");
  } else if (is_in_foreground()) {
    const std::string spaces(drawn_columns_ > columns ? drawn_columns_ - columns : 0, ' ');
    write_fully(STDOUT_FILENO, "\r" + text + (style == Style::kEscapes ? "\033[K" : spaces));
    drawn_columns_ = columns;
  } else {
    drawn_columns_ = 0;  // the shell has written to the terminal since
  }
}

void LiveLine::erase() {
  const size_t columns = std::exchange(drawn_columns_, 0);
  if (columns == 0 || !is_in_foreground()) return;
  write_fully(STDOUT_FILENO, style_ == Style::kEscapes ? "\r\033[K" : "\r" + std::string(columns, ' ') + "\r");
}

void LiveLine::complete_line() {
  if (std::exchange(drawn_columns_, 0) > 0 && is_in_foreground()) write_fully(STDOUT_FILENO, "\n");
}

void LiveLine::complete_at_exit() {
  auto& line = of_process();
  if (std::unique_lock lock(line.mutex_, std::try_to_lock); lock.owns_lock()) line.complete_line();
}

void LiveLine::complete_at_terminate() {
  complete_at_exit();
  if (const auto previous = previous_terminate.load()) previous();
  std::abort();
}

LiveLine::Pause::Pause(int file) : line_(of_process()) {
  if (!line_.overlaps_line(file)) return;
  lock_ = std::unique_lock(line_.mutex_);
  line_.erase();
}

LiveLine::Pause::~Pause() {
  if (lock_.owns_lock()) line_.draw();
}

}  // namespace lockstep
