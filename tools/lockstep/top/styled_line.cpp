#include "top/styled_line.h"

#include "base/characters.h"

namespace lockstep::top {
namespace {

/// The beginning of the text that takes at most `columns` columns.
std::string_view beginning(std::string_view text, size_t columns) {
  auto rest = text;
  size_t used = 0;
  while (!rest.empty()) {
    auto after = rest;
    used += lockstep::columns_of(take_character(after));
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
  while (!text.empty()) columns += lockstep::columns_of(take_character(text));
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
