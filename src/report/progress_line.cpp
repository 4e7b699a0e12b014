#include "report/progress_line.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/characters.h"
#include "base/text.h"

namespace lockstep {
namespace {

constexpr size_t kNarrowestBar = 8, kWidestBar = 30;
constexpr double kMuchWaiting = 0.2;

constexpr const char* kBold = "\033[1m";
constexpr const char* kDim = "\033[2m";
constexpr const char* kCyan = "\033[36m";
constexpr const char* kYellow = "\033[33m";

/// The parts of a line, in the order in which they are dropped from a line that is too long.
enum class Keep { kPercentage, kWaiting, kValue, kRate, kBar, kTime, kFirstValue, kTitle, kSteps };

struct Part {
  Keep keep;
  std::string text;
  const char* colour = nullptr;
};

std::string repeat(const char* text, size_t count) {
  std::string result;
  while (count-- > 0) result += text;
  return result;
}

std::string painted(const std::string& text, const char* colour, const LineStyle& style) {
  return style.has_colour && colour != nullptr && !text.empty() ? colour + text + "\033[0m" : text;
}

template <class... Format>
std::string digits_of(double value, Format... format) {
  std::array<char, 400> digits;  // DBL_MAX has 309
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value, format...).ptr;
  return std::string(digits.data(), end);
}

/// Returns the value with `digits` significant digits, and without exponent.
std::string significant(double value, int digits) {
  const auto rounded = digits_of(value, std::chars_format::scientific, digits - 1);  // "9.99e+02"
  const auto sign = rounded.find('e') + 1;
  const int exponent = parse_number<int>(std::string_view(rounded).substr(sign + 1)).value_or(0);
  return digits_of(value, std::chars_format::fixed,
                   std::max(0, digits - 1 - (rounded[sign] == '-' ? -exponent : exponent)));
}

std::string render_bar(const ProgressView& view, size_t columns, const LineStyle& style) {
  const double fraction = std::clamp(static_cast<double>(view.done) / static_cast<double>(view.total), 0.0, 1.0);
  if (!style.has_unicode) {
    const auto full = static_cast<size_t>(fraction * static_cast<double>(columns - 2));
    return text("[", painted(repeat("#", full), kCyan, style), std::string(columns - 2 - full, '-'), "]");
  }
  const auto halves = static_cast<size_t>(fraction * static_cast<double>(2 * columns));
  const auto filled = repeat("━", halves / 2) + repeat("╸", halves % 2);
  return painted(filled, kCyan, style) + painted(repeat("─", columns - halves / 2 - halves % 2), kDim, style);
}

std::string percent(double fraction) {
  return text(static_cast<int>(std::clamp(fraction, 0.0, 1.0) * 100), " %");
}

/// Returns the text with spaces before it. Numbers that grow do not move the rest of the line.
std::string right_aligned(std::string text, size_t width) {
  if (text.size() < width) text.insert(0, width - text.size(), ' ');
  return text;
}

/// "120/469", with spaces before a number that is shorter than the total, or "120" if the total is unknown.
std::string count_steps(const ProgressView& view, bool is_padded) {
  const auto done = std::to_string(view.done);
  if (view.total == 0) return done;
  const auto total = std::to_string(view.total);
  return right_aligned(done, is_padded ? total.size() : 0) + "/" + total;
}

/// Samples per second or, if no samples are counted, steps per second; seconds per step if a step takes longer.
std::string describe_rate(const ProgressView& view, std::string (*format)(double)) {
  if (view.samples_per_second) return text(format(*view.samples_per_second), " samples/s");
  if (!view.steps_per_second) return "";
  if (*view.steps_per_second < 1) return text(format(1 / *view.steps_per_second), " s/step");
  return text(format(*view.steps_per_second), " steps/s");
}

/// The time left while the bar runs, if known. The elapsed time after the bar's end, or if the total is unknown.
std::string describe_time(const ProgressView& view) {
  if (view.has_ended) return "in " + format_duration(view.elapsed);
  if (view.left) return "eta " + format_duration(*view.left);
  return view.total == 0 ? format_duration(view.elapsed) : "";
}

std::string full_number(double value) {
  return value < 100 ? significant(value, 3) : digits_of(value, std::chars_format::fixed, 0);
}

/// All parts that have a text, in the order of the line, with a bar of the least width.
std::vector<Part> parts_of(const ProgressView& view) {
  const bool has_bar = view.total > 0 && !view.has_ended;
  std::vector<Part> parts{{Keep::kTitle, printable(view.title), kBold}, {Keep::kSteps, count_steps(view, has_bar)}};
  if (has_bar) {
    parts.push_back({Keep::kBar, std::string(kNarrowestBar, ' ')});
    const auto part = percent(static_cast<double>(view.done) / static_cast<double>(view.total));
    parts.push_back({Keep::kPercentage, right_aligned(part, 5)});
  }
  for (const auto& [name, value] : view.values)
    parts.push_back({&name == &view.values[0].name ? Keep::kFirstValue : Keep::kValue, printable(name) + " " + value});
  parts.push_back({Keep::kRate, describe_rate(view, format_short)});
  if (view.waiting)
    parts.push_back(
        {Keep::kWaiting, "data " + percent(*view.waiting), *view.waiting < kMuchWaiting ? nullptr : kYellow});
  parts.push_back({Keep::kTime, describe_time(view)});
  std::erase_if(parts, [](const Part& part) { return part.text.empty(); });
  return parts;
}

/// Without Unicode, a terminal may show each byte of a title as a character.
size_t width_of(const std::vector<Part>& parts, const LineStyle& style) {
  size_t width = 0;
  for (const auto& part : parts) width += (style.has_unicode ? display_width(part.text) : part.text.size()) + 2;
  return width - 2;
}

}  // namespace

std::string render_live(const ProgressView& view, const LineStyle& style) {
  auto parts = parts_of(view);
  while (parts.size() > 1 && width_of(parts, style) > style.columns) {
    auto least = parts.begin();
    for (auto part = parts.begin(); part != parts.end(); ++part)
      if (part->keep <= least->keep) least = part;  // among values, the last value
    parts.erase(least);
  }
  const size_t width = width_of(parts, style);
  if (width > style.columns) return parts[0].text.substr(0, style.columns);
  std::string line;
  for (const auto& part : parts) {
    if (!line.empty()) line += "  ";
    if (part.keep == Keep::kBar)
      line += render_bar(view, std::min(kNarrowestBar + style.columns - width, kWidestBar), style);
    else
      line += painted(part.text, part.colour, style);
  }
  return line;
}

std::string render_plain(const ProgressView& view) {
  std::string line = printable(view.title);
  auto add = [&](const std::string& part) {
    if (!part.empty()) line += (line.empty() ? "" : "  ") + part;
  };
  add("step " + count_steps(view, false));
  for (const auto& [name, value] : view.values) add(printable(name) + " " + value);
  add(describe_rate(view, full_number));
  if (view.waiting) add("data " + percent(*view.waiting));
  add(describe_time(view));
  return line;
}

size_t display_width(std::string_view text) {
  size_t width = 0;
  while (!text.empty()) {
    if (text.starts_with("\033[")) {
      const auto end = std::find_if(text.begin() + 2, text.end(), [](char c) { return c >= '@' && c <= '~'; });
      text.remove_prefix(static_cast<size_t>(end - text.begin()) + (end != text.end()));
    } else {
      width += columns_of(take_character(text));
    }
  }
  return width;
}

std::string printable(std::string_view text) {
  std::string result(text);
  std::replace_if(
      result.begin(), result.end(), [](unsigned char c) { return c < ' ' || c == 0x7F; }, ' ');
  return result;
}

std::string format_value(double value, bool keeps_zeros) {
  const double size = std::abs(value);
  if (!std::isfinite(value) || (size > 0 && size < 1e-4) || size >= 1e15)
    return digits_of(value, std::chars_format::general, 4);
  auto digits = significant(value, 4);
  if (keeps_zeros || digits.find('.') == digits.npos) return digits;
  digits.erase(digits.find_last_not_of('0') + 1);
  if (digits.back() == '.') digits.pop_back();
  return digits;
}

std::string format_short(double value) {
  constexpr std::array kUnits{"", "k", "M", "G", "T"};
  size_t unit = 0;
  for (; value >= 999.5 && unit + 1 < kUnits.size(); ++unit) value /= 1000;
  return significant(value, 3) + kUnits[unit];
}

std::string format_duration(std::chrono::nanoseconds duration) {
  const auto seconds = std::chrono::round<std::chrono::seconds>(duration).count();
  auto two_digits = [](int64_t number) { return (number < 10 ? "0" : "") + std::to_string(number); };
  const auto minutes = seconds / 60, hours = minutes / 60;
  if (hours >= 24) return text(hours / 24, "d ", two_digits(hours % 24), ":", two_digits(minutes % 60));
  if (hours > 0) return text(hours, ":", two_digits(minutes % 60), ":", two_digits(seconds % 60));
  return text(minutes, ":", two_digits(seconds % 60));
}

}  // namespace lockstep
