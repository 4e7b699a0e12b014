#include "top/view.h"

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>

#include "cli/terminal.h"

namespace lockstep::top {
namespace {

using live::RankState;
using live::RankView;

constexpr size_t kMaxReportLines = 4;
constexpr size_t kMaxFailureLines = 4;
constexpr size_t kMinTableRows = 3;
constexpr size_t kMinLogRows = 3;  // the title and two lines

const std::array<std::pair<std::string_view, Key>, 20> kKeys{
    {{"q", Key::kQuit},           {"k", Key::kUp},        {"\033[A", Key::kUp},   {"\033OA", Key::kUp},
     {"j", Key::kDown},           {"\033[B", Key::kDown}, {"\033OB", Key::kDown}, {"\033[5~", Key::kPageUp},
     {"\033[6~", Key::kPageDown}, {" ", Key::kPageDown},  {"g", Key::kFirst},     {"\033[H", Key::kFirst},
     {"\033[1~", Key::kFirst},    {"G", Key::kLast},      {"\033[F", Key::kLast}, {"\033[4~", Key::kLast},
     {"s", Key::kSort},           {"l", Key::kLog},       {"?", Key::kHelp},      {"h", Key::kHelp}}};

constexpr std::array kHelp{"q                quit",
                           "up, k  down, j   select a rank",
                           "page up, down    a page of ranks",
                           "g, G             the first, the last rank",
                           "s                sort by rank, state, step, samples/s, communication",
                           "l                log of the selected rank on or off",
                           "?                this help",
                           "",
                           "FWD, BWD, COMM, DATA: shares of the rank's time in forward, backward,",
                           "blocked in calls of groups, and waiting for batches.",
                           "straggler, !: the other ranks wait for this rank.",
                           "silent: the rank has not written its live file for 5 seconds.",
                           "x: the rank has failed."};

/// The length of the escape sequence at the beginning; 0 if it is incomplete.
size_t sequence_bytes(std::string_view bytes) {
  if (bytes.size() < 2) return 0;
  if (bytes[1] == 'O') return bytes.size() < 3 ? 0 : 3;
  if (bytes[1] != '[') return 1;  // the key Escape, and then another key
  for (size_t i = 2; i < bytes.size(); ++i)
    if (bytes[i] >= '@' && bytes[i] <= '~') return i + 1;
  return 0;
}

const char* paint_of_job(RankState state) {
  return state == RankState::kFailed    ? paint::kBoldRed
         : state == RankState::kSilent  ? paint::kBoldYellow
         : state == RankState::kRunning ? paint::kGreen
                                        : paint::kBlue;
}

/// "ranks: 3 running, 1 failed".
std::string count_text(const live::JobView& job) {
  std::string text = "ranks";
  const char* separator = ": ";
  for (auto state :
       {RankState::kRunning, RankState::kSilent, RankState::kFinished, RankState::kStopped, RankState::kFailed}) {
    const auto count =
        std::count_if(job.ranks.begin(), job.ranks.end(), [&](const RankView& rank) { return rank.state == state; });
    if (count == 0) continue;
    text += fmt::format("{}{} {}", separator, count, live::name_of(state));
    separator = ", ";
  }
  return text;
}

/// The end of a path, if all of it does not fit: "...ns/mnist".
std::string end_of(const std::string& path, size_t columns, bool has_unicode) {
  if (columns_of(path) <= columns || path.size() != columns_of(path) || columns < 4) return path;
  return (has_unicode ? "…" : "~") + path.substr(path.size() - columns + 1);
}

std::vector<std::string> header_lines(const Shown& shown, const Style& style) {
  const auto& job = shown.job;
  std::string facts;
  if (!job.job.empty()) facts += fmt::format("  job {}", clipped(live::printable(job.job), 16, style.has_unicode));
  if (job.attempt > 0) facts += fmt::format("  attempt {}", job.attempt + 1);
  facts += "  " + clock_text(job.elapsed);
  const std::string state = live::name_of(job.state);
  const size_t others = columns_of(facts) + state.size() + 2;
  StyledLine first(style);
  first.add(
      end_of(live::printable(shown.run), std::max<size_t>(style.columns, others + 12) - others, style.has_unicode),
      paint::kBold);
  first.add("  ").add(state, paint_of_job(job.state)).add(facts);

  StyledLine second(style);
  if (job.epochs > 0)
    second.add(fmt::format("epoch {:.2f}/{:.0f}  ", job.epoch, job.epochs));
  else
    second.add(fmt::format("epoch {:.2f}  ", job.epoch));
  second.add(fmt::format("step {}  ", job.step));
  if (job.samples_per_second) second.add(speed_text(job.samples_per_second) + " samples/s  ");
  second.add(count_text(job));
  if (job.batches > 0) second.add(fmt::format("  batch {}/{}", job.batch, job.batches));
  return {first.text(), second.text()};
}

std::vector<std::string> wrapped(const std::string& text, const Style& style, const char* painted, size_t most) {
  std::vector<std::string> lines;
  for (const auto& line : tool::wrap(text, style.columns)) {
    if (lines.size() == most) break;
    lines.push_back(StyledLine(style).add(line, painted).text());
  }
  return lines;
}

/// Which rank failed first, and which files cannot be read.
std::vector<std::string> report_lines(const live::JobView& job, const Style& style, size_t most) {
  std::vector<std::string> lines;
  if (!job.report.empty()) lines = wrapped(job.report, style, paint::kRed, most);
  if (job.problems.empty()) return lines;
  const auto more = job.problems.size() == 1 ? "" : fmt::format(" (and {} more)", job.problems.size() - 1);
  lines.push_back(StyledLine(style).add(live::printable(job.problems[0]) + more, paint::kYellow).text());
  return lines;
}

/// "rank 3  pid 1003 on node0  cuda:0  in all_reduce (world, call 812) at train.cpp:88".
std::string title_of(const RankView& rank) {
  std::string title = fmt::format("rank {}", rank.rank);
  if (rank.pid != 0) title += fmt::format("  pid {} on {}", rank.pid, rank.host);
  if (!rank.device.empty()) title += "  " + rank.device;
  if (rank.gpu && !rank.gpu->name.empty()) title += "  " + rank.gpu->name;
  if (rank.call)
    title += fmt::format("  in {} ({}, call {}) at {}", rank.call->operation, rank.call->group, rank.call->number,
                         rank.call->where);
  return live::printable(title);
}

/// The lines below the table: the selected rank, its failure and its output. At most `most` lines.
std::vector<std::string> detail_lines(const RankView& rank, const std::vector<std::string>& log, const Style& style,
                                      size_t most) {
  std::vector<std::string> lines;
  const std::string rule = style.has_unicode ? "── " : "-- ";
  lines.push_back(StyledLine(style).add(rule, paint::kFaint).add(title_of(rank), paint::kBold).text());
  if (rank.failure && !rank.failure->message.empty())
    for (auto& line : wrapped(live::printable(rank.failure->kind + ": " + rank.failure->message), style, paint::kRed,
                              kMaxFailureLines))
      lines.push_back(std::move(line));
  if (rank.failure && !rank.failure->flight_recorder.empty())
    lines.push_back(StyledLine(style).add("flight recorder: " + live::printable(rank.failure->flight_recorder)).text());
  const size_t room = most > lines.size() ? most - lines.size() : 0;
  if (log.empty() && room > 0) lines.push_back(StyledLine(style).add("no output", paint::kFaint).text());
  for (size_t i = log.size() - std::min(room, log.size()); i < log.size(); ++i)
    lines.push_back(StyledLine(style).add(log[i]).text());
  lines.resize(std::min(lines.size(), most));
  return lines;
}

std::string footer(const Choice& choice, const Style& style, size_t first, size_t last, size_t all) {
  const auto range = last > first && last - first < all ? fmt::format("{}-{} of {}  ", first + 1, last, all) : "";
  StyledLine line(style, paint::kFaint);
  line.add(range).add(style.has_unicode ? "q quit  ↑↓ select  " : "q quit  j/k select  ");
  line.add(fmt::format("s sort: {}  l log  ? help", name_of(choice.sort)));
  return line.text();
}

/// The row of the selected rank; 0 if the rank is gone.
size_t selected_row(const std::vector<const RankView*>& ranks, const Choice& choice) {
  for (size_t i = 0; i < ranks.size(); ++i)
    if (ranks[i]->rank == choice.selected) return i;
  return 0;
}

std::vector<std::string> waiting_lines(const Style& style) {
  return {"", StyledLine(style).add("No rank has written a live file yet. Ranks write one when they make their").text(),
          StyledLine(style).add("TrainingRun, unless TrainingRunOptions::live is false.").text()};
}

void append(std::vector<std::string>& lines, std::vector<std::string> more) {
  lines.insert(lines.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
}

Frame help_frame(std::vector<std::string> lines, const Style& style) {
  lines.emplace_back();
  for (const char* line : kHelp) lines.push_back(StyledLine(style).add(line).text());
  lines.resize(std::min(lines.size(), style.rows));
  return {std::move(lines), 1};
}

/// The number of rows of the table and of the detail below it, if `room` rows are left for both.
std::pair<size_t, size_t> divide(size_t room, size_t ranks, bool shows_log) {
  if (!shows_log || room < kMinTableRows + kMinLogRows) return {std::min(room, ranks), 0};
  const size_t table = std::min(ranks, std::max(kMinTableRows, room - std::max(kMinLogRows, room / 3)));
  return {table, room - table};
}

}  // namespace

std::vector<Key> take_keys(std::string& bytes) {
  std::vector<Key> keys;
  std::string_view rest = bytes;
  while (!rest.empty()) {
    const size_t length = rest[0] == '\033' ? sequence_bytes(rest) : 1;
    if (length == 0) break;
    const auto* found = std::find_if(kKeys.begin(), kKeys.end(),
                                     [&](const auto& known) { return known.first == rest.substr(0, length); });
    keys.push_back(found == kKeys.end() ? Key::kOther : found->second);
    rest.remove_prefix(length);
  }
  bytes.erase(0, bytes.size() - rest.size());
  if (bytes.size() > 32) bytes.clear();  // not a key
  return keys;
}

void apply(Key key, Choice& choice, const live::JobView& job, size_t page) {
  if (key == Key::kHelp || choice.shows_help) {
    choice.shows_help = key == Key::kHelp && !choice.shows_help;  // any key leaves the help
    return;
  }
  if (key == Key::kLog) choice.shows_log = !choice.shows_log;
  if (key == Key::kSort) {
    choice.sort = next_of(choice.sort);
    choice.selected.reset();  // shows the beginning of the new order
  }
  constexpr std::array kMoves{Key::kUp, Key::kDown, Key::kPageUp, Key::kPageDown, Key::kFirst, Key::kLast};
  if (std::find(kMoves.begin(), kMoves.end(), key) == kMoves.end()) return;
  const auto ranks = sorted(job, choice.sort);
  if (ranks.empty()) return;
  const size_t last = ranks.size() - 1;
  size_t index = selected_row(ranks, choice);
  if (key == Key::kUp) index -= std::min<size_t>(1, index);
  if (key == Key::kDown) index = std::min(last, index + 1);
  if (key == Key::kPageUp) index -= std::min(page, index);
  if (key == Key::kPageDown) index = std::min(last, index + page);
  if (key == Key::kFirst) index = 0;
  if (key == Key::kLast) index = last;
  choice.selected = ranks[index]->rank;
}

std::optional<int64_t> selected_rank(const Choice& choice, const live::JobView& job) {
  const auto ranks = sorted(job, choice.sort);
  return ranks.empty() ? std::nullopt : std::optional(ranks[selected_row(ranks, choice)]->rank);
}

Frame draw(const Shown& shown, Choice& choice, const Style& style) {
  auto lines = header_lines(shown, style);
  if (choice.shows_help) return help_frame(std::move(lines), style);
  const auto ranks = sorted(shown.job, choice.sort);
  const auto report = report_lines(shown.job, style, std::min(kMaxReportLines, style.rows / 5));
  if (ranks.empty()) append(lines, waiting_lines(style));
  const RankTable table(shown.job, style);
  if (!ranks.empty()) lines.push_back(table.header());
  const size_t used = lines.size() + report.size() + 1;  // the footer
  const auto [rows, details] = divide(style.rows > used ? style.rows - used : 0, ranks.size(), choice.shows_log);
  const size_t selected = selected_row(ranks, choice);
  choice.first_row = std::clamp(choice.first_row, selected + 1 - std::min(selected + 1, rows), selected);
  choice.first_row = std::min(choice.first_row, ranks.size() - rows);
  for (size_t i = choice.first_row; i < choice.first_row + rows; ++i)
    lines.push_back(table.row(*ranks[i], i == selected));
  append(lines, report);
  if (details > 0 && !ranks.empty()) append(lines, detail_lines(*ranks[selected], shown.log, style, details));
  lines.resize(style.rows > 0 ? style.rows - 1 : 0);  // the footer is in the last row
  if (style.rows > 0) lines.push_back(footer(choice, style, choice.first_row, choice.first_row + rows, ranks.size()));
  return {std::move(lines), std::max<size_t>(1, rows)};
}

std::vector<std::string> draw_once(const Shown& shown, const Style& style) {
  auto lines = header_lines(shown, style);
  const RankTable table(shown.job, style);
  lines.push_back(table.header());
  for (const auto& rank : shown.job.ranks) lines.push_back(table.row(rank, false));
  append(lines, report_lines(shown.job, style, shown.job.report.size() + 1));
  for (auto& line : lines) line.erase(line.find_last_not_of(' ') + 1);
  return lines;
}

}  // namespace lockstep::top
