#include "launch/output.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include <lockstep/error.h>

#include "base/error.h"
#include "base/log.h"
#include "base/private_files.h"
#include "base/text.h"

namespace lockstep {
namespace {

/// mkdir -p for the parent folders of `path`. Does not use std::filesystem, because some libraries export incompatible
/// versions of its functions.
void make_folders(const std::string& path) {
  for (auto slash = path.find('/', 1); slash != path.npos; slash = path.find('/', slash + 1))
    if (::mkdir(path.substr(0, slash).c_str(), 0777) != 0 && errno != EEXIST)
      throw SystemError(
          text("mkdir ", path.substr(0, slash), ": ", std::strerror(errno), "; set --log-dir to a writable folder"));
}

/// Creates the file, or truncates the file of an earlier run.
FileDescriptor create_file(const std::string& path) {
  make_folders(path);
  try {
    auto file = open_own_file(path, O_WRONLY | O_APPEND | O_CREAT);
    if (::ftruncate(file.get(), 0) != 0) throw SystemError(text("truncate ", path, ": ", std::strerror(errno)));
    return file;
  } catch (const Error& error) {
    throw SystemError(text(error.what(), "; --log-dir chooses the folder"));
  }
}

bool write_all(int file, std::string_view bytes) {
  while (!bytes.empty()) {
    ssize_t put = ::write(file, bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return false;
    bytes.remove_prefix(static_cast<size_t>(put));
  }
  return true;
}

// Red is reserved for failures.
std::string coloured(const std::string& prefix, int colour) {
  constexpr std::array kColours{36, 32, 33, 35, 34};  // cyan, green, yellow, magenta, blue
  return text("\033[", kColours[static_cast<size_t>(colour) % kColours.size()], "m",
              prefix.substr(0, prefix.size() - 1), "\033[0m ");
}

}  // namespace

namespace {

/// Returns the text that a terminal shows of a line with carriage returns: the text after the last carriage return, or
/// before it if no text follows.
std::string_view visible(std::string_view line) {
  while (line.ends_with('\r')) line.remove_suffix(1);
  const auto last = line.rfind('\r');
  return last == line.npos ? line : line.substr(last + 1);
}

}  // namespace

std::vector<std::string> LineCutter::feed(std::string_view bytes) {
  std::vector<std::string> lines;
  for (size_t end; (end = bytes.find('\n')) != bytes.npos; bytes.remove_prefix(end + 1)) {
    lines.push_back(std::string(visible(partial_.append(bytes.substr(0, end)))));
    partial_.clear();
  }
  partial_ += bytes;
  // Text that a complete update has overwritten is not needed any more.
  if (const auto shown = partial_.find_last_not_of('\r'); shown != partial_.npos)
    if (const auto last = partial_.rfind('\r', shown); last != partial_.npos) partial_.erase(0, last);
  if (partial_.size() >= kLongest) lines.push_back(take_rest());
  return lines;
}

std::string LineCutter::progress() const {
  return partial_.find('\r') == partial_.npos ? "" : std::string(visible(partial_));
}

std::string LineCutter::take_rest() {
  return std::string(visible(std::exchange(partial_, {})));
}

void StderrMemory::add(const std::string& line) {
  if (line.starts_with("frame #")) return;  // backtraces of LibTorch's errors; the worker's output has them
  tail_.push_back(line);
  if (tail_.size() > kLines) tail_.pop_front();
  auto after = [&](std::string_view beginning) -> std::optional<std::string> {
    if (!line.starts_with(beginning)) return std::nullopt;
    return line.substr(beginning.size());
  };
  if (auto type = after("terminate called after throwing an instance of '")) {  // libstdc++'s message
    type_ = without_nesting(type->substr(0, type->rfind('\'')));
    what_.clear();
  } else if (auto what = after("  what():  ")) {
    what_ = *what;
  } else if (auto both = after("libc++abi: terminating with uncaught exception of type ")) {
    auto colon = both->find(": ");
    type_ = without_nesting(both->substr(0, colon));
    what_ = colon == both->npos ? "" : both->substr(colon + 2);
  }
}

std::string StderrMemory::uncaught() const {
  return what_.empty() ? type_ : text(type_, ": ", what_);
}

StreamOutput::StreamOutput(FileDescriptor pipe, Options options, Console* console)
    : pipe_(std::move(pipe)),
      options_(std::move(options)),
      prefix_(console->has_colour(options_.stream) ? coloured(options_.prefix, options_.colour) : options_.prefix),
      console_(console) {
  if (options_.route.to_file) file_ = create_file(options_.path);
}

bool StreamOutput::forward_output() {
  std::array<char, 64 << 10> bytes;
  ssize_t got = ::read(pipe_.get(), bytes.data(), bytes.size());
  if (got < 0 && errno == EINTR) return true;
  if (got < 0 && errno == EAGAIN) return false;
  if (got <= 0) {
    pipe_ = FileDescriptor();
    return false;
  }
  std::string_view some(bytes.data(), static_cast<size_t>(got));
  if (file_.is_open() && !write_all(file_.get(), some)) {
    log_warning(text("write ", options_.path, ": ", std::strerror(errno), "; no more output is written to this file"));
    file_ = FileDescriptor();
  }
  show(cutter_.feed(some));
  show_progress();
  return true;
}

bool StreamOutput::read_some() {
  return forward_output();
}

void StreamOutput::finish() {
  while (pipe_.is_open() && forward_output()) {
  }
  pipe_ = FileDescriptor();
  if (auto rest = cutter_.take_rest(); !rest.empty()) show({rest});
}

// A terminal shows each state of a progress bar in place of the previous state. A pipe or file gets one line per
// second.
void StreamOutput::show_progress() {
  constexpr auto kBetweenLines = std::chrono::seconds(1);
  auto state = cutter_.progress();
  if (!options_.route.to_console || state.empty() || state == progress_) return;
  const auto now = std::chrono::steady_clock::now();
  if (!console_->is_terminal(options_.stream) && now - progress_shown_ < kBetweenLines) return;
  console_->put_progress(options_.stream, prefix_, state, this);
  progress_ = std::move(state);
  progress_shown_ = now;
}

void StreamOutput::show(const std::vector<std::string>& lines) {
  if (lines.empty()) return;
  progress_.clear();  // a line has replaced it
  std::string shown;
  for (const auto& line : lines) {
    if (options_.memory) options_.memory->add(line);
    if (options_.tail) options_.tail->add(line);
    if (options_.route.to_console) shown.append(prefix_).append(line).append(1, '\n');
  }
  console_->put(options_.stream, shown, this);
}

}  // namespace lockstep
