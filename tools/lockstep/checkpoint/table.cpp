#include "checkpoint/table.h"

#include <algorithm>
#include <array>
#include <numeric>

#include <fmt/format.h>

#include "cli/terminal.h"

namespace lockstep::checkpoint {
namespace {

constexpr size_t kGap = 2;
constexpr size_t kNarrowest = 12;  // a column is not shortened further

bool continues_character(char byte) {
  return (static_cast<unsigned char>(byte) & 0xC0) == 0x80;  // in UTF-8
}

size_t width_of(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return !continues_character(c); }));
}

/// The position at which the character with this number begins.
size_t position_of(const std::string& text, size_t character) {
  size_t at = 0;
  for (; at < text.size(); ++at)
    if (!continues_character(text[at]) && character-- == 0) break;
  return at;
}

std::string pad(const std::string& text, size_t width, bool is_right) {
  const std::string blanks(width - std::min(width, width_of(text)), ' ');
  return is_right ? blanks + text : text + blanks;
}

}  // namespace

Style output_style() {
  const auto terminal = tool::stdout_style();
  Style style;
  style.colour = terminal.colour;
  if (terminal.is_terminal) style.columns = std::min(style.columns, static_cast<size_t>(terminal.columns));
  return style;
}

std::string paint(const std::string& text, const char* colour, const Style& style) {
  return style.colour ? fmt::format("\033[{}m{}\033[0m", colour, text) : text;
}

std::string printable(std::string_view text) {
  std::string result(text);
  for (char& letter : result) {
    const auto code = static_cast<unsigned char>(letter);
    if (code < 0x20 || code == 0x7F) letter = '?';
  }
  return result;
}

std::string shorten(const std::string& text, size_t columns) {
  const size_t width = width_of(text);
  if (width <= columns || columns < 4) return text;
  const size_t kept = columns - 3, front = kept / 2;
  return text.substr(0, position_of(text, front)) + "..." + text.substr(position_of(text, width - (kept - front)));
}

std::string human_bytes(uint64_t bytes) {
  constexpr std::array kUnits{"KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return fmt::format("{} B", bytes);
  auto number = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  for (; number >= 1023.95 && unit + 1 < kUnits.size(); ++unit) number /= 1024;
  return fmt::format("{:.1f} {}", number, kUnits[unit]);
}

std::string counted(uint64_t count, const std::string& noun) {
  if (count == 1) return "1 " + noun;
  const bool is_y = noun.ends_with('y');
  return fmt::format("{} {}", count, is_y ? noun.substr(0, noun.size() - 1) + "ies" : noun + "s");
}

void Table::add(std::vector<std::string> cells) {
  for (auto& cell : cells) cell = printable(cell);
  cells.resize(columns_.size());
  rows_.push_back(std::move(cells));
}

std::vector<size_t> Table::widths(size_t columns) const {
  std::vector<size_t> widths;
  for (size_t i = 0; i < columns_.size(); ++i) {
    size_t width = width_of(columns_[i].title);
    for (const auto& row : rows_) width = std::max(width, width_of(row[i]));
    widths.push_back(width);
  }
  for (;;) {  // shorten the widest column, one character at a time
    const size_t total = std::accumulate(widths.begin(), widths.end(), (widths.size() - 1) * kGap);
    if (total <= columns) return widths;
    size_t* widest = nullptr;
    for (size_t i = 0; i < widths.size(); ++i)
      if (columns_[i].shrinks && widths[i] > kNarrowest && (!widest || widths[i] > *widest)) widest = &widths[i];
    if (!widest) return widths;
    --*widest;
  }
}

std::string Table::text(const Style& style) const {
  const auto widths = this->widths(style.columns);
  const auto line = [&](const std::vector<std::string>& cells) {
    std::string text;
    for (size_t i = 0; i < cells.size(); ++i)
      text +=
          (i > 0 ? std::string(kGap, ' ') : "") + pad(shorten(cells[i], widths[i]), widths[i], columns_[i].is_right);
    text.erase(text.find_last_not_of(' ') + 1);
    return text;
  };
  std::vector<std::string> titles;
  for (const auto& column : columns_) titles.push_back(column.title);
  std::string text = paint(line(titles), kBold, style) + "\n";
  for (const auto& row : rows_) text += line(row) + "\n";
  return text;
}

}  // namespace lockstep::checkpoint
