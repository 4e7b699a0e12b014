#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace lockstep::tool {

/// Lines of at most `columns`, broken between words and, in paths that are longer, behind slashes.
std::vector<std::string> wrap(const std::string& text, size_t columns);

struct TableStyle {
  int columns = 100;
  bool colour = false;
};

/// As wide as the terminal; without one, 100 columns. Coloured on a terminal unless NO_COLOR is set and not empty.
TableStyle stdout_style();

}  // namespace lockstep::tool
