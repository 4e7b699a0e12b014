#include "launch/console.h"

#include <limits.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <string_view>
#include <utility>

namespace lockstep {
namespace {

constexpr size_t kPart = 64 << 10;
constexpr int kPatienceMs = 1000;  // limit for a reader after a signal

const std::string kClearLine = "\r\033[K";

/// Returns the end of the escape sequence (ESC [ ... letter) that begins at `at`.
size_t end_of_escape(std::string_view text, size_t at) {
  size_t end = at + 1;
  if (end < text.size() && text[end] == '[')
    for (++end; end < text.size() && !(text[end] >= '@' && text[end] <= '~');) ++end;
  return std::min(end + 1, text.size());
}

/// Returns the first `columns` characters of UTF-8 text. Escape sequences take no column and stay, also escape
/// sequences behind the cut: one of them ends a colour.
std::string cut_to_width(std::string_view text, size_t columns) {
  std::string result;
  bool is_cut = false;
  for (size_t at = 0; at < text.size();) {
    if (text[at] == '\033') {
      const auto end = end_of_escape(text, at);
      result += text.substr(at, end - at);
      at = end;
      continue;
    }
    const bool begins_character = (text[at] & 0xC0) != 0x80;
    if (begins_character) is_cut = is_cut || columns-- == 0;
    if (!is_cut) result += text[at];
    ++at;
  }
  return result;
}

size_t visible_width(std::string_view text) {
  size_t width = 0;
  for (size_t at = 0; at < text.size();) {
    if (text[at] == '\033') {
      at = end_of_escape(text, at);
      continue;
    }
    width += (text[at++] & 0xC0) != 0x80;
  }
  return width;
}

bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value && *value;
}

}  // namespace

Console::Console() {
  const char* terminal = std::getenv("TERM");
  const bool may = !is_set("NO_COLOR") && !(terminal && std::string_view(terminal) == "dumb");
  for (int file : {STDOUT_FILENO, STDERR_FILENO}) {
    is_terminal_[file] = ::isatty(file);
    has_colour_[file] = may && is_terminal_[file];
  }
}

int Console::columns(Stream stream) const {
  winsize size{};
  return ::ioctl(static_cast<int>(stream), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

// If both streams are terminals, they are the same terminal.
void Console::put(Stream stream, const std::string& lines, const void* owner) {
  if (lines.empty()) return;
  if (!progress_ || !is_terminal(stream)) return queue(stream, lines);
  queue(progress_->stream, kClearLine);
  queue(stream, lines);
  if (progress_->owner == owner) return progress_.reset();
  draw_progress();
}

void Console::put_progress(Stream stream, const std::string& prefix, const std::string& state, const void* owner) {
  if (!is_terminal(stream)) return put(stream, prefix + state + "\n");
  progress_ = {stream, prefix, state, owner};
  draw_progress();
}

// The state is cut to the width of the terminal: a terminal cannot overwrite a line that it has wrapped.
void Console::draw_progress() {
  const auto& [stream, prefix, state, owner] = *progress_;
  const auto all = static_cast<size_t>(columns(stream));
  const size_t room = all - std::min(visible_width(prefix), all - 1) - 1;
  queue(stream, kClearLine + prefix + cut_to_width(state, room));
}

void Console::queue(Stream stream, const std::string& bytes) {
  unwritten_ += bytes.size();
  if (!queue_.empty() && queue_.back().stream == stream && queue_.back().bytes.size() < kPart)
    queue_.back().bytes += bytes;
  else
    queue_.push_back({stream, bytes});
}

void Console::write_some() {
  Part& part = queue_.front();
  // A writable pipe accepts PIPE_BUF bytes without blocking, but possibly not more.
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
