#include "top/styled_line.h"

#include <algorithm>
#include <array>

namespace lockstep::top {
namespace {

/// Decodes the character at the beginning of `text`, which is UTF-8, and removes it.
char32_t take_character(std::string_view& text) {
  const auto lead = static_cast<unsigned char>(text[0]);
  const size_t length = std::min<size_t>(lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : lead >= 0xC0 ? 2 : 1, text.size());
  char32_t character = length == 1 ? lead : lead & (0xFF >> (length + 1));
  for (size_t i = 1; i < length; ++i) character = (character << 6) | (static_cast<unsigned char>(text[i]) & 0x3F);
  text.remove_prefix(length);
  return character;
}

/// Not by wcwidth(), which knows only the locale that the program has set.
size_t columns_of_character(char32_t character) {
  struct Range {
    char32_t first, last;
  };
  constexpr std::array kNone{Range{0x300, 0x36F}, Range{0x200B, 0x200F}, Range{0x20D0, 0x20F0}, Range{0xFE00, 0xFE0F},
                             Range{0xFEFF, 0xFEFF}};
  constexpr std::array kWide{Range{0x1100, 0x115F},   Range{0x2E80, 0x303E},   Range{0x3041, 0xA4CF},
                             Range{0xAC00, 0xD7A3},   Range{0xF900, 0xFAFF},   Range{0xFE30, 0xFE6F},
                             Range{0xFF01, 0xFF60},   Range{0xFFE0, 0xFFE6},   Range{0x1F300, 0x1F64F},
                             Range{0x1F680, 0x1F6FF}, Range{0x1F900, 0x1F9FF}, Range{0x20000, 0x3FFFD}};
  const auto is_in = [&](const Range& range) { return character >= range.first && character <= range.last; };
  if (std::any_of(kNone.begin(), kNone.end(), is_in)) return 0;
  return std::any_of(kWide.begin(), kWide.end(), is_in) ? 2 : 1;
}

/// The beginning of the text that takes at most `columns` columns.
std::string_view beginning(std::string_view text, size_t columns) {
  auto rest = text;
  size_t used = 0;
  while (!rest.empty()) {
    auto after = rest;
    used += columns_of_character(take_character(after));
    if (used > columns) break;
    rest = after;
  }
  return text.substr(0, text.size() - rest.size());
}

std::string as_ascii(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const auto character = take_character(text);
    result += character < 0x80 ? static_cast<char>(character) : '?';
  }
  return result;
}

}  // namespace

size_t columns_of(std::string_view text) {
  size_t columns = 0;
  while (!text.empty()) columns += columns_of_character(take_character(text));
  return columns;
}

std::string clipped(std::string_view text, size_t columns, bool has_unicode) {
  const std::string shown = has_unicode ? std::string(text) : as_ascii(text);
  if (columns_of(shown) <= columns) return shown;
  if (columns == 0) return "";
  return std::string(beginning(shown, columns - 1)) + (has_unicode ? "…" : "~");
}

void StyledLine::append(std::string_view text, const std::string& painted) {
  const auto shown = clipped(text, columns_left(), style_.has_unicode);
  used_ += columns_of(shown);
  text_ +=
      style_.has_colour && !painted.empty() && !shown.empty() ? "\033[" + painted + "m" + shown + "\033[0m" : shown;
}

StyledLine& StyledLine::add(std::string_view text, const char* painted) {
  const bool has_both = !base_.empty() && *painted != '\0';
  append(text, base_ + (has_both ? ";" : "") + painted);
  return *this;
}

StyledLine& StyledLine::add_bare(std::string_view text, const char* painted) {
  append(text, painted);
  return *this;
}

StyledLine& StyledLine::left(std::string_view text, size_t width, const char* painted) {
  auto cell = clipped(text, width, style_.has_unicode);
  return add(cell.append(width - columns_of(cell), ' '), painted);
}

StyledLine& StyledLine::right(std::string_view text, size_t width, const char* painted) {
  auto cell = clipped(text, width, style_.has_unicode);
  return add(cell.insert(0, width - columns_of(cell), ' '), painted);
}

StyledLine& StyledLine::fill() {
  return add(std::string(columns_left(), ' '));
}

}  // namespace lockstep::top
