#include "top/rank_table.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include <fmt/format.h>

namespace lockstep::top {
namespace {

using live::RankState;
using live::RankView;

constexpr size_t kMinNote = 21;  // "in all_reduce for 5 s"
constexpr size_t kBar = 20;
constexpr size_t kWidestHost = 16;

struct Part {
  const char* header;
  char letter;  // in a bar without colours
  const char* painted;
  std::optional<double> live::TimeShares::*share;
};

constexpr std::array kParts{Part{"FWD", 'F', paint::kBlue, &live::TimeShares::forward},
                            Part{"BWD", 'B', paint::kMagenta, &live::TimeShares::backward},
                            Part{"COMM", 'C', paint::kYellow, &live::TimeShares::communication},
                            Part{"DATA", 'D', paint::kCyan, &live::TimeShares::data}};

std::string share_text(const std::optional<double>& share) {
  return share ? fmt::format("{:.0f}%", *share * 100) : "-";
}

/// "512M" or "1.5G"; "-" if unknown.
std::string bytes_text(const std::optional<int64_t>& bytes) {
  if (!bytes || *bytes < 0) return "-";
  auto value = static_cast<double>(*bytes) / 1024;
  for (const char unit : {'K', 'M', 'G', 'T'}) {
    if (value < 1000 || unit == 'T') return fmt::format("{:.{}f}{}", value, value < 10 ? 1 : 0, unit);
    value /= 1024;
  }
  return "-";
}

const char* paint_of(const RankView& rank) {
  switch (rank.state) {
    case RankState::kRunning:
      return rank.is_straggler ? paint::kBoldYellow : paint::kGreen;
    case RankState::kSilent:
      return paint::kBoldYellow;
    case RankState::kFailed:
      return paint::kBoldRed;
    case RankState::kFinished:
    case RankState::kStopped:
      return paint::kBlue;
  }
  return paint::kPlain;
}

/// Ranks that need attention first.
int urgency(const RankView& rank) {
  if (rank.state == RankState::kFailed) return 0;
  if (rank.state == RankState::kSilent) return 1;
  if (rank.is_straggler) return 2;
  if (rank.state == RankState::kRunning) return rank.call ? 3 : 4;
  return 5;
}

/// The value by which rows are sorted, ascending.
double sort_key(const RankView& rank, Sort sort) {
  constexpr double kLast = 1e300;
  switch (sort) {
    case Sort::kRank:
      return static_cast<double>(rank.rank);
    case Sort::kState:
      return urgency(rank);
    case Sort::kStep:
      return rank.has_file ? static_cast<double>(rank.step) : kLast;
    case Sort::kSpeed:
      return rank.samples_per_second.value_or(kLast);
    case Sort::kCommunication:
      return rank.time.communication.value_or(kLast);
  }
  return 0;
}

/// Whether the speed and the time shares of the rank are current.
bool has_current_values(const RankView& rank) {
  return rank.state == RankState::kRunning && rank.has_file;
}

/// The stacked bar of the time: a colour for each part, or its letter.
void add_bar(StyledLine& line, const RankView& rank, size_t width, const Style& style) {
  const bool has_blocks = style.has_colour && style.has_unicode;
  size_t used = 0;
  double sum = 0;
  for (const auto& part : kParts) {
    sum += (rank.time.*part.share).value_or(0);
    const auto end = std::min(width, static_cast<size_t>(std::lround(sum * static_cast<double>(width))));
    std::string cells;
    for (; used < end; ++used) cells += has_blocks ? "▇" : std::string(1, part.letter);
    line.add_bare(cells, part.painted);
  }
  line.add_bare(std::string(width - used, has_blocks ? ' ' : '.'), paint::kFaint);
}

}  // namespace

const char* name_of(Sort sort) {
  switch (sort) {
    case Sort::kRank:
      return "rank";
    case Sort::kState:
      return "state";
    case Sort::kStep:
      return "step";
    case Sort::kSpeed:
      return "samples/s";
    case Sort::kCommunication:
      return "communication";
  }
  return "";
}

Sort next_of(Sort sort) {
  return sort == Sort::kCommunication ? Sort::kRank : static_cast<Sort>(static_cast<int>(sort) + 1);
}

std::vector<const RankView*> sorted(const live::JobView& job, Sort sort) {
  std::vector<const RankView*> ranks;
  for (const auto& rank : job.ranks) ranks.push_back(&rank);
  std::stable_sort(ranks.begin(), ranks.end(),
                   [&](const RankView* a, const RankView* b) { return sort_key(*a, sort) < sort_key(*b, sort); });
  return ranks;
}

RankTable::RankTable(const live::JobView& job, const Style& style) : style_(style) {
  std::set<std::string> hosts;
  for (const auto& rank : job.ranks) {
    rank_ = std::max(rank_, fmt::formatted_size("{}", rank.rank));
    step_ = std::max(step_, fmt::formatted_size("{}", rank.step));
    if (!rank.host.empty()) hosts.insert(rank.host);
    if (rank.gpu) gpu_ = 4;
    if (rank.gpu) gpu_memory_ = 6;
  }
  if (hosts.size() > 1)
    for (const auto& host : hosts)
      host_ = std::clamp(columns_of(live::printable(host)), std::max<size_t>(host_, 4), kWidestHost);
  const auto width = [&] {
    size_t sum = 3 + kMinNote;  // the marks, and the note
    for (size_t column : {rank_, host_, state_, step_, speed_, memory_, gpu_, gpu_memory_, bar_})
      sum += column == 0 ? 0 : column + 1;
    return sum + (share_ == 0 ? 0 : kParts.size() * (share_ + 1));
  };
  const size_t widest_host = host_;
  for (size_t* column : {&gpu_memory_, &memory_, &gpu_, &host_, &share_, &speed_})
    if (width() > style_.columns) *column = 0;
  if (share_ == 0) host_ = widest_host;  // without the shares the host may fit
  if (width() > style_.columns) host_ = 0;
  if (share_ != 0 && width() + kBar + 1 <= style_.columns) bar_ = kBar;
}

std::string RankTable::header() const {
  StyledLine line(style_);
  line.add("   ").right("RANK", rank_, paint::kBold).add(" ");
  if (host_ != 0) line.left("HOST", host_, paint::kBold).add(" ");
  line.left("STATE", state_, paint::kBold).add(" ").right("STEP", step_, paint::kBold).add(" ");
  if (speed_ != 0) line.right("SAMP/S", speed_, paint::kBold).add(" ");
  if (share_ != 0)
    for (const auto& part : kParts) line.right(part.header, share_, part.painted).add(" ");
  if (bar_ != 0) line.left("TIME", bar_, paint::kBold).add(" ");
  if (memory_ != 0) line.right("MEM", memory_, paint::kBold).add(" ");
  if (gpu_ != 0) line.right("GPU", gpu_, paint::kBold).add(" ");
  if (gpu_memory_ != 0) line.right("GPUMEM", gpu_memory_, paint::kBold).add(" ");
  line.add("NOTE", paint::kBold);
  return line.text();
}

// In a row without current values the note replaces them, so it is complete also in a narrow terminal.
std::string RankTable::row(const RankView& rank, bool is_selected) const {
  const bool is_red = rank.state == RankState::kFailed;
  StyledLine line(style_, !is_selected ? paint::kPlain : is_red ? paint::kReverseRed : paint::kReverse);
  const char* plain = is_red ? paint::kRed : paint::kPlain;
  const char* state = rank.is_straggler && rank.state == RankState::kRunning ? "straggler" : live::name_of(rank.state);
  line.add(is_selected ? ">" : " ");
  if (rank.is_straggler || is_red)
    line.add(rank.is_straggler ? "!" : "x", paint_of(rank)).add(" ");
  else
    line.add("  ");
  line.right(fmt::format("{}", rank.rank), rank_, plain).add(" ");
  if (host_ != 0) line.left(live::printable(rank.host), host_, plain).add(" ");
  line.left(state, state_, paint_of(rank)).add(" ");
  line.right(rank.has_file ? fmt::format("{}", rank.step) : "-", step_, plain).add(" ");
  if (has_current_values(rank)) add_parts(line, rank);
  line.add(rank.note, is_red ? paint::kRed : rank.is_straggler ? paint::kYellow : paint::kPlain);
  if (is_selected) line.fill();
  return line.text();
}

void RankTable::add_parts(StyledLine& line, const RankView& rank) const {
  if (speed_ != 0) line.right(speed_text(rank.samples_per_second), speed_).add(" ");
  if (share_ != 0)
    for (const auto& part : kParts) line.right(share_text(rank.time.*part.share), share_).add(" ");
  if (bar_ != 0) {
    add_bar(line, rank, bar_, style_);
    line.add(" ");
  }
  if (memory_ != 0) line.right(bytes_text(rank.resident_bytes), memory_).add(" ");
  if (gpu_ != 0) line.right(rank.gpu ? share_text(rank.gpu->utilization) : "-", gpu_).add(" ");
  if (gpu_memory_ != 0) line.right(rank.gpu ? bytes_text(rank.gpu->memory_used_bytes) : "-", gpu_memory_).add(" ");
}

std::string speed_text(const std::optional<double>& per_second) {
  if (!per_second) return "-";
  double value = *per_second;
  if (value < 9.995) return fmt::format("{:.2f}", value);
  if (value < 99.95) return fmt::format("{:.1f}", value);
  if (value < 999.5) return fmt::format("{:.0f}", value);
  for (const char unit : {'k', 'M', 'G'}) {
    value /= 1000;
    if (value < 99.95) return fmt::format("{:.1f}{}", value, unit);
    if (value < 999.5) return fmt::format("{:.0f}{}", value, unit);
  }
  return fmt::format("{:.0e}", value * 1e9);
}

std::string clock_text(double seconds) {
  const auto all = static_cast<int64_t>(std::clamp(seconds, 0.0, 1e12));
  if (all < 3600) return fmt::format("{}:{:02}", all / 60, all % 60);
  return fmt::format("{}:{:02}:{:02}", all / 3600, all / 60 % 60, all % 60);
}

}  // namespace lockstep::top
