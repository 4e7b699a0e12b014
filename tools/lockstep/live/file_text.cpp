#include "live/file_text.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include <lockstep/error.h>

#include "live/records.h"

namespace lockstep::live {
namespace {

constexpr size_t kMetricsTailBytes = size_t{64} << 10;
constexpr size_t kOutputTailBytes = size_t{256} << 10;

/// The last bytes of a file, from the beginning of a line on; empty without the file. Throws Error if it cannot be
/// read.
std::string read_end(const RunFolder& run, const std::filesystem::path& name, size_t most) {
  const auto opened = run.open(name);
  if (!opened) return "";
  const size_t count = std::min(opened->size(), most);
  const auto bytes = opened->read(opened->size() - count, count);
  const auto newline = count < opened->size() ? bytes.find('\n') : bytes.npos;
  return newline == bytes.npos ? bytes : bytes.substr(newline + 1);
}

/// The length of the UTF-8 character at the beginning, or 0 if the bytes are not UTF-8.
size_t character_bytes(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const size_t length = byte(0) < 0x80 ? 1 : byte(0) < 0xC2 ? 0 : byte(0) < 0xE0 ? 2 : byte(0) < 0xF0 ? 3 : 4;
  if (length == 0 || byte(0) > 0xF4 || length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i)
    if ((byte(i) & 0xC0) != 0x80) return 0;
  if (length == 3 && ((byte(0) == 0xE0 && byte(1) < 0xA0) || (byte(0) == 0xED && byte(1) > 0x9F))) return 0;
  if (length == 4 && ((byte(0) == 0xF0 && byte(1) < 0x90) || (byte(0) == 0xF4 && byte(1) > 0x8F))) return 0;
  return length;
}

/// The length of the escape sequence at the beginning of the text, which begins with ESC.
size_t escape_bytes(std::string_view text) {
  if (text.size() < 2) return text.size();
  if (text[1] == ']') {  // a command of the system: up to BEL, or ESC and a backslash
    const auto end = text.find_first_of("\a\033", 2);
    return end == text.npos ? text.size() : end + (text[end] == '\a' ? 1 : 2);
  }
  if (text[1] != '[') return 2;
  size_t end = 2;
  while (end < text.size() && (text[end] < '@' || text[end] > '~')) ++end;
  return end + 1;
}

}  // namespace

std::optional<std::string> read_bytes(const RunFolder& run, const std::filesystem::path& name, size_t most) {
  const auto opened = run.open(name);
  if (!opened) return std::nullopt;
  if (opened->size() > most) throw Error(fmt::format("it has {} bytes, and at most {} are read", opened->size(), most));
  return opened->read(0, opened->size());
}

std::string printable(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const auto first = static_cast<unsigned char>(text[0]);
    size_t length = 1;
    if (first == 0x1B) {
      length = std::min(escape_bytes(text), text.size());
    } else if (first < 0x20 || first == 0x7F) {
      result += ' ';
    } else if (const size_t bytes = character_bytes(text); bytes == 0) {
      result += "\xEF\xBF\xBD";
    } else if (first == 0xC2 && static_cast<unsigned char>(text[1]) < 0xA0) {  // control characters beyond ASCII
      result += ' ';
      length = bytes;
    } else {
      result += text.substr(0, bytes);
      length = bytes;
    }
    text.remove_prefix(length);
  }
  return result;
}

std::vector<std::string> last_lines(const std::filesystem::path& run, int64_t rank, size_t count) {
  const auto bytes = read_end(RunFolder(run), fmt::format("live/output-{:05}.log", rank), kOutputTailBytes);
  std::vector<std::string> lines;
  size_t end = bytes.size();
  if (end > 0 && bytes[end - 1] == '\n') --end;
  while (lines.size() < count && !bytes.empty()) {
    const auto newline = end == 0 ? bytes.npos : bytes.rfind('\n', end - 1);
    const size_t begin = newline == bytes.npos ? 0 : newline + 1;
    auto line = std::string_view(bytes).substr(begin, end - begin);
    if (line.ends_with('\r')) line.remove_suffix(1);
    lines.push_back(
        printable(line.substr(line.rfind('\r') + 1)));  // the text that a terminal shows of a line drawn in place
    if (newline == bytes.npos) break;
    end = newline;
  }
  std::reverse(lines.begin(), lines.end());
  return lines;
}

std::map<std::string, double> last_metrics(const std::filesystem::path& run) {
  std::map<std::string, double> metrics;
  std::string bytes;
  try {
    bytes = read_end(RunFolder(run), "metrics.jsonl", kMetricsTailBytes);
  } catch (const Error&) {
    return metrics;
  }
  Records records;
  records.append(bytes);
  for (size_t i = 0; i < records.metrics().size(); ++i) {
    const double of_steps = records.steps().last_value(i);
    const double value = std::isfinite(of_steps) ? of_steps : records.epochs().last_value(i);
    if (std::isfinite(value)) metrics[records.metrics()[i]] = value;
  }
  for (const auto x : {XAxis::kStep, XAxis::kEpoch, XAxis::kTime})
    if (const double last = records.last_position(x); std::isfinite(last)) metrics[key_of(x)] = last;
  return metrics;
}

}  // namespace lockstep::live
