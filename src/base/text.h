#pragma once

#include <locale>
#include <ostream>
#include <sstream>
#include <string>

namespace lockstep {

/// The arguments printed one after the other: error messages are written as they read.
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  out.imbue(std::locale::classic());  // what ranks compare must not depend on where a rank was started
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

}  // namespace lockstep
