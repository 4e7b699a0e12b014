#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace lockstep::tool {

/// Wraps text to lines of at most `columns`. Lines break between words; longer paths break after slashes.
std::vector<std::string> wrap(const std::string& text, size_t columns);

struct TableStyle {
  int columns = 100;
  bool colour = false;
  bool is_terminal = false;
};

/// The width of the terminal, or 100 columns without a terminal. Coloured on a terminal unless NO_COLOR is set and not
/// empty.
TableStyle stdout_style();

}  // namespace lockstep::tool
