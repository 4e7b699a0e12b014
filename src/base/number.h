#pragma once

#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

namespace lockstep {

/// All of `written` as a number; none for anything else, blanks, signs other than '-' and overflow included.
template <class Integer>
std::optional<Integer> parse_number(std::string_view written) {
  Integer number = 0;
  const char* end = written.data() + written.size();
  auto result = std::from_chars(written.data(), end, number);
  if (result.ec != std::errc() || result.ptr != end) return std::nullopt;
  return number;
}

}  // namespace lockstep
