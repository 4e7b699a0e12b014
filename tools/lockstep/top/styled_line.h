#pragma once

#include <cstddef>
#include <string>
#include <string_view>

/// Lines of a terminal, built from cells of fixed widths. All functions are pure.
namespace lockstep::top {

struct Style {
  size_t columns = 100;
  size_t rows = 0;  // 0: as many as are needed
  bool has_colour = false;
  bool has_unicode = false;
};

/// Colours and attributes, as parameters of the escape sequence that selects them.
namespace paint {
inline constexpr const char* kPlain = "";
inline constexpr const char* kBold = "1";
inline constexpr const char* kFaint = "2";
inline constexpr const char* kReverse = "7";
inline constexpr const char* kReverseRed = "7;31";
inline constexpr const char* kRed = "31";
inline constexpr const char* kBoldRed = "1;31";
inline constexpr const char* kGreen = "32";
inline constexpr const char* kYellow = "33";
inline constexpr const char* kBoldYellow = "1;33";
inline constexpr const char* kBlue = "34";
inline constexpr const char* kMagenta = "35";
inline constexpr const char* kCyan = "36";
}  // namespace paint

/// The columns that printable UTF-8 text takes.
size_t columns_of(std::string_view text);

/// The text, or its beginning with "…" or "~" at the end, so that it takes at most `columns` columns. Characters beyond
/// ASCII become "?" if the terminal has no Unicode.
std::string clipped(std::string_view text, size_t columns, bool has_unicode);

/// A line that never takes more than the columns of the style: further text is cut off.
class StyledLine {
 public:
  /// `base` is added to the paint of every cell: kReverse for a selected row.
  explicit StyledLine(const Style& style, const char* base = paint::kPlain) : style_(style), base_(base) {}

  /// Appends text without padding.
  StyledLine& add(std::string_view text, const char* painted = paint::kPlain);
  /// Appends text without the base: a bar of blocks would vanish in reverse video.
  StyledLine& add_bare(std::string_view text, const char* painted);
  /// Appends a cell of exactly this width.
  StyledLine& left(std::string_view text, size_t width, const char* painted = paint::kPlain);
  StyledLine& right(std::string_view text, size_t width, const char* painted = paint::kPlain);
  /// Appends blanks up to the width of the terminal.
  StyledLine& fill();

  size_t columns_left() const { return style_.columns - used_; }
  const std::string& text() const { return text_; }

 private:
  void append(std::string_view text, const std::string& painted);

  const Style style_;
  const std::string base_;
  std::string text_;
  size_t used_ = 0;
};

}  // namespace lockstep::top
