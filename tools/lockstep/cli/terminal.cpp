#include "cli/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <sstream>

namespace lockstep::tool {
namespace {

/// The number of characters to put on a line of a word longer than the line: up to a slash, or all without a slash.
size_t part_that_fits(const std::string& word, size_t columns) {
  if (word.size() <= columns) return word.size();
  const auto slash = word.rfind('/', columns - 1);
  return slash == std::string::npos || slash == 0 ? word.size() : slash + 1;
}

}  // namespace

std::vector<std::string> wrap(const std::string& text, size_t columns) {
  std::vector<std::string> lines{""};
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    if (!lines.back().empty() && lines.back().size() + 1 + word.size() <= columns) {
      lines.back() += " " + word;
      continue;
    }
    while (!word.empty()) {
      const size_t size = part_that_fits(word, columns);
      if (!lines.back().empty()) lines.emplace_back();
      lines.back() = word.substr(0, size);
      word.erase(0, size);
    }
  }
  return lines;
}

TableStyle stdout_style() {
  TableStyle style;
  if (::isatty(STDOUT_FILENO) == 0) return style;
  style.is_terminal = true;
  const char* no_colour = std::getenv("NO_COLOR");
  style.colour = !no_colour || *no_colour == '\0';
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) style.columns = size.ws_col;
  return style;
}

}  // namespace lockstep::tool
