#include "ui/metrics_reader.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <lockstep/error.h>

namespace lockstep::ui {
namespace {

constexpr size_t kPieceBytes = size_t{4} << 20;
constexpr size_t kMaxLine = size_t{1} << 20;
constexpr size_t kComparedBytes = 64;

}  // namespace

std::string MetricsReader::problem() const {
  const std::lock_guard lock(mutex_);
  return problem_;
}

bool MetricsReader::is_continued(const live::OpenFile& opened) const {
  const auto& status = opened.status;
  if (status.st_dev != device_ || status.st_ino != number_ || opened.size() < offset_) return false;
  return opened.read(offset_ - last_bytes_.size(), last_bytes_.size()) == last_bytes_;
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
  // Without the end of a line or of the file, the rest is not a complete line.
  const bool may_be_complete = at_end || rest_.find('\n', rest_.size() - std::min(rest_.size(), count)) != rest_.npos;
  if (may_be_complete) rest_.erase(0, records_.append(rest_));
  if (rest_.size() <= kMaxLine) return;
  records_.add_damaged_line("it is longer than 1 MiB");
  rest_.clear();
  is_line_skipped_ = true;
}

/// Returns whether more of the file is left. Throws Error with the reason if the file cannot be read.
bool MetricsReader::take_piece(bool& has_changed) {
  const auto opened = live::RunFolder(run_).open(name_);
  if (!opened) {
    has_changed = has_changed || number_ != 0;
    if (std::exchange(number_, 0) != 0) begin_again();
    return false;
  }
  if (!is_continued(*opened)) {
    has_changed = has_changed || offset_ > 0;
    begin_again();
    device_ = opened->status.st_dev;
    number_ = opened->status.st_ino;
  }
  const auto piece = opened->read(offset_, std::min(kPieceBytes, opened->size() - offset_));
  if (piece.empty()) return false;
  rest_ += piece;
  offset_ += piece.size();
  last_bytes_ = rest_.substr(rest_.size() - std::min(kComparedBytes, rest_.size()));
  append(piece.size(), offset_ == opened->size());
  has_changed = true;
  return offset_ < opened->size();
}

/// Reads one piece. Returns whether more of the file is left.
bool MetricsReader::read_piece(bool& has_changed) {
  bool is_more_left = false;
  std::string problem;
  try {
    is_more_left = take_piece(has_changed);
  } catch (const Error& error) {
    problem = fmt::format("{}: {}", name_, error.what());
  }
  const std::lock_guard lock(mutex_);
  has_changed = has_changed || problem_ != problem;
  problem_ = std::move(problem);
  return is_more_left;
}

}  // namespace lockstep::ui
