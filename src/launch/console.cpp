#include "launch/console.h"

#include <limits.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <string_view>

namespace lockstep {
namespace {

constexpr size_t kPart = 64 << 10;
constexpr int kPatienceMs = 1000;  // limit for a reader after a signal

bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value && *value;
}

}  // namespace

Console::Console() {
  const char* terminal = std::getenv("TERM");
  const bool may = !is_set("NO_COLOR") && !(terminal && std::string_view(terminal) == "dumb");
  for (int file : {STDOUT_FILENO, STDERR_FILENO}) has_colour_[file] = may && ::isatty(file);
}

void Console::put(Stream stream, const std::string& lines) {
  if (lines.empty()) return;
  unwritten_ += lines.size();
  if (!queue_.empty() && queue_.back().stream == stream && queue_.back().bytes.size() < kPart)
    queue_.back().bytes += lines;
  else
    queue_.push_back({stream, lines});
}

void Console::write_some() {
  Part& part = queue_.front();
  // A writable pipe accepts PIPE_BUF bytes without blocking, but possibly no more.
  const size_t most = std::min<size_t>(part.bytes.size() - part.written, PIPE_BUF);
  ssize_t put = ::write(static_cast<int>(part.stream), part.bytes.data() + part.written, most);
  if (put < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (put < 0) put = static_cast<ssize_t>(part.bytes.size() - part.written);  // the reader is gone: discard the part
  part.written += static_cast<size_t>(put);
  unwritten_ -= static_cast<size_t>(put);
  if (part.written == part.bytes.size()) queue_.pop_front();
}

void Console::flush(int interrupt, bool is_urgent) {
  while (waits_for() >= 0) {
    pollfd ready[2] = {{waits_for(), POLLOUT, 0}, {interrupt, POLLIN, 0}};
    const int count = ::poll(ready, 2, is_urgent ? kPatienceMs : -1);
    if (ready[0].revents != 0)
      write_some();
    else if (ready[1].revents != 0 || (count == 0 && is_urgent))
      drop(queue_.front().stream);
  }
}

void Console::drop(Stream stream) {
  std::erase_if(queue_, [&](const Part& part) { return part.stream == stream; });
  unwritten_ = 0;
  for (const auto& part : queue_) unwritten_ += part.bytes.size() - part.written;
}

}  // namespace lockstep
