#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::checkpoint {

/// How to print to stdout.
struct Style {
  size_t columns = 110;
  bool colour = false;
};

/// At most 110 columns, or the width of the terminal if it is narrower. Coloured only on a terminal.
Style output_style();

inline constexpr const char* kBold = "1";
inline constexpr const char* kRed = "1;31";
inline constexpr const char* kGreen = "32";

std::string paint(const std::string& text, const char* colour, const Style& style);

/// Text of a file as it may be printed: control characters, which a terminal would execute, become '?'.
std::string printable(std::string_view text);

/// Shortens text to `columns` characters with "..." in the middle.
std::string shorten(const std::string& text, size_t columns);

/// "512 B", "1.2 MiB".
std::string human_bytes(uint64_t bytes);

/// "1 tensor", "2 tensors".
std::string counted(uint64_t count, const std::string& noun);

/// A table with a line of titles. Columns are separated by two blanks.
class Table {
 public:
  struct Column {
    std::string title;
    bool is_right = false;  // aligned right: numbers
    bool shrinks = false;   // the column is shortened if the table is too wide
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  void add(std::vector<std::string> cells);
  bool is_empty() const { return rows_.empty(); }
  std::string text(const Style& style) const;

 private:
  std::vector<size_t> widths(size_t columns) const;

  const std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;  // printable
};

}  // namespace lockstep::checkpoint
