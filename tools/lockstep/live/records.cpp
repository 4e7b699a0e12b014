#include "live/records.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

// Lines are flat objects of numbers, and consecutive lines usually have the same keys in the same order. The scanner
// therefore compares each key with the key at the same place in the previous line, and looks it up only if they differ.
// Short numbers are converted exactly with one multiplication or division, other numbers by std::from_chars. No tree of
// values is built and no memory is allocated for a line.

namespace lockstep::live {
namespace {

constexpr double kNoNumber = std::numeric_limits<double>::quiet_NaN();
constexpr int kTypeKey = -1, kStepKey = -2;  // then the epoch and the seconds

bool is_blank(char c) {
  return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

constexpr double kPowers[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                              1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};

/// Parses a number of JSON at `at` and moves `at` behind it. Returns false if there is none.
bool read_number(const char*& at, const char* end, double& value) {
  const char* const begin = at;
  const char* p = at;
  const bool is_negative = p < end && *p == '-';
  if (is_negative) ++p;
  if (p == end || !is_digit(*p)) return false;
  uint64_t digits = 0;
  const char* const first = p;
  for (; p < end && is_digit(*p); ++p) digits = digits * 10 + static_cast<uint64_t>(*p - '0');
  auto count = p - first;
  ptrdiff_t decimals = 0;
  if (p < end && *p == '.') {
    const char* const point = ++p;
    for (; p < end && is_digit(*p); ++p) digits = digits * 10 + static_cast<uint64_t>(*p - '0');
    decimals = p - point;
    if (decimals == 0) return false;
    count += decimals;
  }
  const bool has_exponent = p < end && (*p == 'e' || *p == 'E');
  constexpr uint64_t kExact = uint64_t{1} << 53;
  if (!has_exponent && count <= 19 && digits <= kExact && decimals <= 22) {
    value = static_cast<double>(digits) / kPowers[decimals];
    if (is_negative) value = -value;
    at = p;
    return true;
  }
  const auto parsed = std::from_chars(begin, end, value);
  if (parsed.ec == std::errc::invalid_argument) return false;
  if (parsed.ec == std::errc::result_out_of_range) value = kNoNumber;
  at = parsed.ptr;
  return true;
}

/// The text of a string of JSON with escapes; empty if it is not valid.
std::string unescaped(std::string_view quoted) {
  const auto parsed = nlohmann::json::parse(quoted, nullptr, false);
  return parsed.is_string() ? parsed.get<std::string>() : "";
}

/// The value as JSON, for a message of one line.
std::string in_message(const nlohmann::json& value) {
  constexpr size_t kMaxLetters = 40;
  if (value.is_object()) return "an object";
  if (value.is_array()) return "an array";
  const auto text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  return text.size() <= kMaxLetters ? text : text.substr(0, kMaxLetters) + "...\"";
}

/// Returns why a line is no valid record. Uses a slow parser, whose errors are better than those of the scanner.
std::string problem_of(std::string_view line) {
  nlohmann::json record;
  try {
    record = nlohmann::json::parse(line);
  } catch (const nlohmann::json::parse_error& error) {
    return fmt::format("it is not valid JSON from column {} on", error.byte);
  } catch (const nlohmann::json::exception&) {  // a number that does not fit
    return "it is not valid JSON";
  }
  if (!record.is_object())
    return fmt::format("it is {}, not an object", record.is_number() ? "a number" : in_message(record));
  for (const auto& [name, value] : record.items()) {
    const bool is_type = name == "type";
    if (is_type ? value == "step" || value == "epoch" : value.is_number() || value.is_null()) continue;
    return fmt::format("{} is {}, not {}", in_message(name), in_message(value),
                       is_type ? "\"step\" or \"epoch\"" : "a number or null");
  }
  return record.contains("type") ? "it is not valid JSON" : "it has no \"type\"";
}

}  // namespace

const char* key_of(XAxis x) {
  return x == XAxis::kStep ? "step" : x == XAxis::kEpoch ? "epoch" : "seconds";
}

/// Reads one line into `fields_` of the records.
class LineScanner {
 public:
  LineScanner(Records& records, const char* begin, const char* end) : records_(records), at_(begin), end_(end) {}

  /// Returns whether the line is a valid record.
  bool read() {
    records_.fields_.clear();
    if (!skip('{')) return false;
    if (!skip('}'))
      for (size_t place = 0;; ++place) {
        if (!read_pair(place)) return false;
        if (skip('}')) break;
        if (!skip(',')) return false;
      }
    skip_blanks();
    return at_ == end_ && table_;
  }

  RecordTable& table() const { return *table_; }
  const double (&positions() const)[3] { return positions_; }

 private:
  void skip_blanks() {
    while (at_ < end_ && is_blank(*at_)) ++at_;
  }

  bool skip(char c) {
    skip_blanks();
    if (at_ == end_ || *at_ != c) return false;
    ++at_;
    return true;
  }

  bool starts_with(std::string_view text) const {
    return static_cast<size_t>(end_ - at_) >= text.size() && std::memcmp(at_, text.data(), text.size()) == 0;
  }

  bool read_pair(size_t place) {
    skip_blanks();
    int key = 0;
    if (place < records_.layout_.size() && starts_with(records_.layout_[place])) {
      at_ += records_.layout_[place].size();
      key = records_.layout_keys_[place];
    } else if (!read_new_key(place, key)) {
      return false;
    }
    if (!skip(':')) return false;
    skip_blanks();
    if (key == kTypeKey) return read_type();
    double value = kNoNumber;
    if (starts_with("null"))
      at_ += 4;
    else if (!read_number(at_, end_, value))
      return false;
    if (key < 0)
      positions_[kStepKey - key] = value;
    else
      records_.fields_.push_back({key, value});
    return true;
  }

  /// Reads a key and remembers it for the next line.
  bool read_new_key(size_t place, int& key) {
    const char* const begin = at_;
    if (at_ == end_ || *at_++ != '"') return false;
    bool has_escapes = false;
    for (; at_ < end_ && *at_ != '"'; ++at_)
      if (*at_ == '\\') {
        has_escapes = true;
        if (++at_ == end_) break;
      }
    if (at_ == end_) return false;
    ++at_;
    const std::string_view quoted(begin, static_cast<size_t>(at_ - begin));
    const auto name = has_escapes ? unescaped(quoted) : std::string(quoted.substr(1, quoted.size() - 2));
    if (has_escapes && name.empty()) return false;
    key = key_of(name);
    records_.layout_.resize(place);
    records_.layout_keys_.resize(place);
    records_.layout_.emplace_back(quoted);
    records_.layout_keys_.push_back(key);
    return true;
  }

  /// The number of a metric, or a negative number for "type" and the positions.
  int key_of(const std::string& name) {
    if (name == "type") return kTypeKey;
    if (name == "step") return kStepKey;
    if (name == "epoch") return kStepKey - 1;
    if (name == "seconds") return kStepKey - 2;
    return records_.metric_called(name);
  }

  bool read_type() {
    constexpr std::string_view kStep = "\"step\"", kEpoch = "\"epoch\"";
    const bool is_step = starts_with(kStep);
    if (!is_step && !starts_with(kEpoch)) return false;
    at_ += is_step ? kStep.size() : kEpoch.size();
    table_ = is_step ? &records_.steps_ : &records_.epochs_;
    return true;
  }

  Records& records_;
  const char* at_;
  const char* const end_;
  RecordTable* table_ = nullptr;
  double positions_[3] = {kNoNumber, kNoNumber, kNoNumber};
};

const std::vector<double>& RecordTable::positions(XAxis x) const {
  return x == XAxis::kStep ? step : x == XAxis::kEpoch ? epoch : seconds;
}

double RecordTable::last_value(size_t metric) const {
  if (metric >= columns.size()) return kNoNumber;
  const auto& values = columns[metric].values;
  const auto found = std::find_if(values.rbegin(), values.rend(), [](double value) { return std::isfinite(value); });
  return found == values.rend() ? kNoNumber : *found;
}

double Records::last_position(XAxis x) const {
  double last = kNoNumber;
  for (const auto* table : {&steps_, &epochs_})
    if (!table->positions(x).empty()) last = std::fmax(last, table->positions(x).back());
  return last;
}

int Records::find(const std::string& metric) const {
  const auto found = numbers_.find(metric);
  return found == numbers_.end() ? -1 : found->second;
}

int Records::metric_called(std::string_view name) {
  const auto [found, is_new] = numbers_.try_emplace(std::string(name), static_cast<int>(metrics_.size()));
  if (is_new) metrics_.emplace_back(name);
  return found->second;
}

void Records::add_record(RecordTable& table, const double (&positions)[3]) {
  const auto row = static_cast<uint32_t>(table.size());
  table.step.push_back(positions[0]);
  table.epoch.push_back(positions[1]);
  table.seconds.push_back(positions[2]);
  if (table.columns.size() < metrics_.size()) table.columns.resize(metrics_.size());
  for (const auto& [metric, value] : fields_) {
    auto& column = table.columns[static_cast<size_t>(metric)];
    if (!column.rows.empty() && column.rows.back() == row) {
      column.values.back() = value;  // the key occurs twice: the last value counts, as in other parsers
      continue;
    }
    column.rows.push_back(row);
    column.values.push_back(value);
  }
}

void Records::add_damaged_line(std::string problem) {
  ++lines_;
  if (damaged_lines_++ > 0) return;
  first_damaged_line_ = lines_;
  first_problem_ = std::move(problem);
}

void Records::read_line(const char* begin, const char* end) {
  while (begin < end && is_blank(*begin)) ++begin;
  if (begin == end) {
    ++lines_;
    return;
  }
  LineScanner line(*this, begin, end);
  if (!line.read())
    return add_damaged_line(damaged_lines_ == 0 ? problem_of({begin, static_cast<size_t>(end - begin)}) : "");
  ++lines_;
  add_record(line.table(), line.positions());
}

size_t Records::append(std::string_view text) {
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at < end) {
    const auto* newline = static_cast<const char*>(std::memchr(at, '\n', static_cast<size_t>(end - at)));
    if (!newline) {
      // A program may not write the end of its last line. A number could still continue, a complete object could not.
      if (end[-1] != '}') break;
      LineScanner line(*this, at, end);
      if (!line.read()) break;
      add_record(line.table(), line.positions());
      at = end;
      break;
    }
    read_line(at, newline);
    at = newline + 1;
  }
  return static_cast<size_t>(at - text.data());
}

}  // namespace lockstep::live
