#pragma once

#include <cstddef>
#include <string_view>

// Characters of UTF-8 text on a terminal.

namespace lockstep {

/// Decodes the character at the beginning of `text` and removes it. A byte that is not UTF-8 counts as a character, and
/// is returned as U+FFFD.
char32_t take_character(std::string_view& text);

/// How many columns of a terminal the character takes: 0, 1 or 2.
size_t columns_of(char32_t character);

}  // namespace lockstep
