#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "live/job_view.h"
#include "top/rank_table.h"
#include "top/styled_line.h"

/// The screen of `lockstep top`, and how keys change it. All functions are pure.
namespace lockstep::top {

enum class Key { kOther, kQuit, kUp, kDown, kPageUp, kPageDown, kFirst, kLast, kSort, kLog, kHelp };

/// The keys in the bytes that a terminal has sent. An incomplete escape sequence at the end stays in `bytes`.
std::vector<Key> take_keys(std::string& bytes);

/// The user's choices.
struct Choice {
  std::optional<int64_t> selected{};  // a rank; none: the first one of the order
  Sort sort = Sort::kRank;
  bool shows_log = true, shows_help = false;
  size_t first_row = 0;  // of the table: the row at its top
};

/// Changes the choice according to the key. kQuit changes nothing. `page` is the number of rows that the table shows.
void apply(Key key, Choice& choice, const live::JobView& job, size_t page);

/// The number of the selected rank; none if the job has no ranks.
std::optional<int64_t> selected_rank(const Choice& choice, const live::JobView& job);

/// The data that are shown.
struct Shown {
  std::string run{};  // its path
  live::JobView job{};
  std::vector<std::string> log{};  // the last lines of the selected rank
};

/// A frame of the full screen.
struct Frame {
  std::vector<std::string> lines{};  // at most as many as the style has rows
  size_t table_rows = 0;
};

/// Draws a frame. Moves `choice.first_row` so that the selected rank is visible.
Frame draw(const Shown& shown, Choice& choice, const Style& style);

/// The header, the whole table and the report, once, as lines.
std::vector<std::string> draw_once(const Shown& shown, const Style& style);

}  // namespace lockstep::top
