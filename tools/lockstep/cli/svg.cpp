#include "cli/svg.h"

#include <cmath>
#include <cstdint>
#include <string_view>

#include <fmt/format.h>

namespace lockstep::svg {
namespace {

constexpr const char* kReplacement = "\uFFFD";

constexpr DarkColour kDarkColours[] = {
    {kInk, "#e6edf3"}, {kFaint, "#9aa4ae"}, {kGrid, "#30363d"}, {kPaper, "#0d1117"}, {kColours[0], "#4ba3e3"}};

std::string dark_rules(const DarkColour& colour) {
  std::string rules;
  for (const char* attribute : {"fill", "stroke"})
    rules += fmt::format("  [{0}=\"{1}\"] {{ {0}: {2} }}\n", attribute, colour.light, colour.dark);
  return rules;
}

/// The length of the UTF-8 sequence at the start of `text`, or 0 if it is not valid. Sets `code`.
size_t sequence_length(std::string_view text, uint32_t& code) {
  const auto first = static_cast<unsigned char>(text[0]);
  const size_t length = first < 0x80   ? 1
                        : first < 0xC2 ? 0
                        : first < 0xE0 ? 2
                        : first < 0xF0 ? 3
                        : first < 0xF5 ? 4
                                       : 0;
  if (length == 0 || length > text.size()) return 0;
  code = length == 1 ? first : first & (0x7FU >> length);
  for (size_t i = 1; i < length; ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if ((byte & 0xC0) != 0x80) return 0;
    code = code << 6 | (byte & 0x3F);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = code >= 0xD800 && code < 0xE000;
  return code < kLeast[length] || is_surrogate || code > 0x10FFFF ? 0 : length;
}

/// The width of a letter in Helvetica, in parts of the font's size.
double letter_width(const std::string& letter) {
  if (letter.size() > 2) return letter == "\u2026" || letter == "\u2013" ? 0.8 : 1;  // as wide as East Asian letters
  if (letter.size() > 1) return 0.6;
  const char c = letter[0];
  if (std::string_view("ijl|'").find(c) != std::string_view::npos) return 0.24;
  if (std::string_view("ft I./,:;!()[]-\"r").find(c) != std::string_view::npos) return 0.31;
  if (std::string_view("mMW%@w").find(c) != std::string_view::npos) return 0.88;
  return c >= 'A' && c <= 'Z' ? 0.7 : 0.56;
}

}  // namespace

std::string head(double width, double height, std::initializer_list<DarkColour> colours) {
  std::string rules;
  for (const auto& colour : kDarkColours) rules += dark_rules(colour);
  for (const auto& colour : colours) rules += dark_rules(colour);
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"100%\" style=\"max-width: {0}px\" viewBox=\"0 0 {0} {1}\" "
      "font-family=\"Helvetica, Arial, 'Liberation Sans', sans-serif\" font-size=\"15\" fill=\"{2}\">\n"
      "<style>\n@media (prefers-color-scheme: dark) {{\n{3}}}\n</style>\n"
      "<rect width=\"{0}\" height=\"{1}\" fill=\"{4}\"/>\n",
      width, height, kInk, rules, kPaper);
}

std::vector<std::string> letters_of(const std::string& text) {
  std::vector<std::string> letters;
  for (size_t at = 0; at < text.size();) {
    uint32_t code = 0;
    const size_t length = sequence_length(std::string_view(text).substr(at), code);
    const bool is_forbidden = code < 0x20 || code == 0x7F || code == 0xFFFE || code == 0xFFFF;
    letters.push_back(length == 0 || is_forbidden ? kReplacement : text.substr(at, length));
    at += length == 0 ? 1 : length;
  }
  return letters;
}

std::string escaped(const std::string& text) {
  std::string safe;
  for (const auto& letter : letters_of(text)) {
    if (letter == "&")
      safe += "&amp;";
    else if (letter == "<")
      safe += "&lt;";
    else if (letter == ">")
      safe += "&gt;";
    else
      safe += letter;
  }
  return safe;
}

std::string line(Point from, Point to, const std::string& style) {
  return fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" {}/>\n", from.x, from.y, to.x, to.y,
                     style);
}

std::string label(Point at, const std::string& text, const std::string& style) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" {}>{}</text>\n", at.x, at.y, style, escaped(text));
}

std::string joined(const std::vector<Point>& points) {
  std::string text;
  for (const auto& [x, y] : points) text += fmt::format("{}{:.1f},{:.1f}", text.empty() ? "" : " ", x, y);
  return text;
}

double text_width(const std::string& text, double font_size) {
  double width = 0;
  for (const auto& letter : letters_of(text)) width += letter_width(letter) * font_size;
  return width;
}

double rounded_down(double value) {
  const double ten = std::pow(10, std::floor(std::log10(value) + 1e-9));
  for (double step : {5.0, 2.0})
    if (step * ten <= value * (1 + 1e-9)) return step * ten;
  return ten;
}

double rounded_up(double value) {
  const double ten = std::pow(10, std::floor(std::log10(value) - 1e-9));
  for (double step : {1.0, 2.0, 5.0})
    if (step * ten >= value * (1 - 1e-9)) return step * ten;
  return 10 * ten;
}

}  // namespace lockstep::svg
