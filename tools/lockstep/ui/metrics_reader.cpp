#include "ui/metrics_reader.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include <fmt/format.h>

#include <lockstep/error.h>

#include "live/run_folder.h"

namespace lockstep::ui {
namespace {

constexpr size_t kPieceBytes = size_t{4} << 20;
constexpr size_t kLongestLine = size_t{1} << 20;
constexpr size_t kComparedBytes = 64;

/// Reads up to `count` bytes at `offset`. Returns -1 on an error.
ssize_t read_at(int file, char* to, size_t count, off_t offset) {
  size_t done = 0;
  while (done < count) {
    const auto got = ::pread(file, to + done, count - done, offset + static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return -1;
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  return static_cast<ssize_t>(done);
}

}  // namespace

std::string MetricsReader::problem() const {
  const std::lock_guard lock(mutex_);
  return problem_;
}

bool MetricsReader::is_continued(int file, off_t size, dev_t device, ino_t number) {
  if (device != device_ || number != number_ || size < offset_) return false;
  std::string now(last_bytes_.size(), '\0');
  const auto got = read_at(file, now.data(), now.size(), offset_ - static_cast<off_t>(now.size()));
  return got == static_cast<ssize_t>(now.size()) && now == last_bytes_;
}

void MetricsReader::begin_again() {
  offset_ = 0;
  rest_.clear();
  last_bytes_.clear();
  is_line_skipped_ = false;
  const std::lock_guard lock(mutex_);
  records_ = Records();
}

/// Adds the complete lines of `rest_`, whose last `count` bytes are new.
void MetricsReader::append(size_t count, bool at_end) {
  const std::lock_guard lock(mutex_);
  if (is_line_skipped_) {
    const auto end = rest_.find('\n');
    rest_.erase(0, end == rest_.npos ? rest_.size() : end + 1);
    is_line_skipped_ = end == rest_.npos;
    if (rest_.empty()) return;
  }
  // Without the end of a line or of the file, the rest is no complete line.
  const bool may_be_complete = at_end || rest_.find('\n', rest_.size() - std::min(rest_.size(), count)) != rest_.npos;
  if (may_be_complete) rest_.erase(0, records_.append(rest_));
  if (rest_.size() <= kLongestLine) return;
  records_.add_damaged_line("it is longer than 1 MiB");
  rest_.clear();
  is_line_skipped_ = true;
}

/// Reads one piece. Returns whether more of the file is left.
bool MetricsReader::read_piece(bool& has_changed) {
  const auto fail = [&](const std::string& why) {
    const std::lock_guard lock(mutex_);
    const auto problem = why.empty() ? "" : fmt::format("{}: {}", name_, why);
    has_changed = has_changed || problem_ != problem;
    problem_ = problem;
    return false;
  };
  std::optional<live::OpenFile> opened;
  try {
    opened = live::RunFolder(run_).open(name_);
  } catch (const Error& error) {
    return fail(error.what());
  }
  if (!opened && number_ != 0) {
    begin_again();
    number_ = 0;
    has_changed = true;
  }
  if (!opened) return fail("");
  const auto& [file, status] = *opened;
  if (!is_continued(file.get(), status.st_size, status.st_dev, status.st_ino)) {
    has_changed = has_changed || offset_ > 0;
    begin_again();
    device_ = status.st_dev;
    number_ = status.st_ino;
  }
  if (status.st_size == offset_) return fail("");
  const size_t before = rest_.size();
  const size_t wanted = std::min(kPieceBytes, static_cast<size_t>(status.st_size - offset_));
  rest_.resize(before + wanted);
  const auto got = read_at(file.get(), rest_.data() + before, wanted, offset_);
  rest_.resize(before + static_cast<size_t>(std::max<ssize_t>(got, 0)));
  if (got <= 0) return fail(got < 0 ? fmt::format("it cannot be read: {}", std::strerror(errno)) : "");
  offset_ += got;
  const auto fresh = std::min(kComparedBytes, rest_.size());
  last_bytes_ = rest_.substr(rest_.size() - fresh);
  append(static_cast<size_t>(got), offset_ == status.st_size);
  has_changed = true;
  fail("");
  return offset_ < status.st_size;
}

}  // namespace lockstep::ui
