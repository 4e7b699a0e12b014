#include "base/characters.h"

#include <algorithm>
#include <array>

namespace lockstep {

char32_t take_character(std::string_view& text) {
  const auto lead = static_cast<unsigned char>(text[0]);
  const size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : lead >= 0xC0 ? 2 : 1;
  char32_t character = length == 1 ? lead : lead & (0xFF >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    if (i >= text.size() || (text[i] & 0xC0) != 0x80) {
      text.remove_prefix(1);
      return 0xFFFD;
    }
    character = (character << 6) | (text[i] & 0x3F);
  }
  text.remove_prefix(length);
  return character;
}

// Not by wcwidth(), which knows only the locale that the program has set.
size_t columns_of(char32_t character) {
  struct Range {
    char32_t first, last;
  };
  constexpr std::array kNone{Range{0x300, 0x36F}, Range{0x200B, 0x200F}, Range{0x20D0, 0x20F0}, Range{0xFE00, 0xFE0F},
                             Range{0xFEFF, 0xFEFF}};
  constexpr std::array kWide{Range{0x1100, 0x115F},   Range{0x2E80, 0x303E},   Range{0x3041, 0xA4CF},
                             Range{0xAC00, 0xD7A3},   Range{0xF900, 0xFAFF},   Range{0xFE30, 0xFE6F},
                             Range{0xFF01, 0xFF60},   Range{0xFFE0, 0xFFE6},   Range{0x1F300, 0x1F64F},
                             Range{0x1F680, 0x1F6FF}, Range{0x1F900, 0x1F9FF}, Range{0x20000, 0x3FFFD}};
  auto is_in = [&](const Range& range) { return character >= range.first && character <= range.last; };
  if (std::any_of(kNone.begin(), kNone.end(), is_in)) return 0;
  return std::any_of(kWide.begin(), kWide.end(), is_in) ? 2 : 1;
}

}  // namespace lockstep
