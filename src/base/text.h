#pragma once

#include <charconv>
#include <locale>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>

namespace lockstep {

/// Concatenates the arguments as operator<< prints them, in the classic locale.
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  out.imbue(std::locale::classic());  // ranks compare such texts, so they must not depend on the locale
  (out << ... << parts);
  return out.str();
}

/// "a, b and c"; "none" for an empty list.
template <class List>
std::string enumerate(const List& list) {
  std::ostringstream out;
  size_t left = list.size();
  if (left == 0) return "none";
  for (const auto& item : list) {
    out << item;
    --left;
    if (left > 1) out << ", ";
    if (left == 1) out << " and ";
  }
  return out.str();
}

/// Parses all of `written` as a number. Returns none for anything else, including blanks, a leading '+' and overflow.
template <class Integer>
std::optional<Integer> parse_number(std::string_view written) {
  Integer number = 0;
  const char* end = written.data() + written.size();
  auto result = std::from_chars(written.data(), end, number);
  if (result.ec != std::errc() || result.ptr != end) return std::nullopt;
  return number;
}

}  // namespace lockstep
