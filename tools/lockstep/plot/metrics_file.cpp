#include "plot/metrics_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <unordered_map>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <lockstep/error.h>

namespace lockstep::plot {
namespace {

constexpr double kNoNumber = std::numeric_limits<double>::quiet_NaN();

/// The text in quotes, for a message of one line.
std::string in_quotes(const std::string& text) {
  constexpr size_t kMaxLetters = 40;
  const auto dumped = nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  return dumped.size() <= kMaxLetters ? dumped : dumped.substr(0, kMaxLetters) + "...\"";
}

/// Receives the parts of a record from the parser. A file may have a million records, so no tree of values is built.
/// The functions return false to stop at a record that is not valid; `problem` then has the reason.
class RecordReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  struct Number {
    std::string key;
    double value;
  };

  /// Reads a line. Returns false if the line is not a valid record.
  bool read(const std::string& line) {
    count_ = 0;
    type_.reset();
    depth_ = 0;
    problem_.clear();
    return nlohmann::json::sax_parse(line, this) && (type_ || refuse("it has no \"type\""));
  }

  /// "step" or "epoch".
  const std::string& type() const { return *type_; }
  size_t size() const { return count_; }
  const Number& operator[](size_t i) const { return numbers_[i]; }
  const std::string& problem() const { return problem_; }

  bool null() override { return add(kNoNumber, "null"); }
  bool number_integer(int64_t value) override { return add(static_cast<double>(value), "a number"); }
  bool number_unsigned(uint64_t value) override { return add(static_cast<double>(value), "a number"); }
  bool number_float(double value, const std::string&) override { return add(value, "a number"); }
  bool boolean(bool value) override { return refuse_value(value ? "true" : "false"); }
  bool binary(binary_t&) override { return refuse_value("binary"); }
  bool start_array(size_t) override { return refuse_value("an array"); }
  bool end_array() override { return true; }
  bool end_object() override { return true; }

  bool string(std::string& value) override {
    if (depth_ == 0 || key_ != "type") return refuse_value(in_quotes(value));
    if (value != "step" && value != "epoch") return refuse_value(in_quotes(value));
    type_ = value;
    return true;
  }

  bool start_object(size_t) override { return depth_++ == 0 || refuse_value("an object"); }

  bool key(std::string& name) override {
    key_.swap(name);
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) override {
    return refuse(fmt::format("it is not valid JSON from column {} on", position));
  }

 private:
  bool refuse(std::string problem) {
    if (problem_.empty()) problem_ = std::move(problem);
    return false;
  }

  bool refuse_value(const std::string& value) {
    if (depth_ == 0) return refuse(fmt::format("it is {}, not an object", value));
    return refuse(fmt::format("{} is {}, not {}", in_quotes(key_), value,
                              key_ == "type" ? "\"step\" or \"epoch\"" : "a number or null"));
  }

  bool add(double value, const char* name) {
    if (depth_ == 0 || key_ == "type") return refuse_value(name);
    if (count_ == numbers_.size()) numbers_.emplace_back();
    numbers_[count_].key.swap(key_);  // no allocation: the strings are reused for every record
    numbers_[count_++].value = value;
    return true;
  }

  std::vector<Number> numbers_;  // the first `count_` belong to the record
  size_t count_ = 0;
  std::optional<std::string> type_;
  std::string key_;
  int depth_ = 0;
  std::string problem_;
};

bool is_position(const std::string& key) {
  return key == "step" || key == "epoch" || key == "seconds";
}

/// Collects the records of a file.
class CurveCollector {
 public:
  explicit CurveCollector(XAxis x) : x_(key_of(x)) {}

  /// Returns the problem of a record that has no position, or an empty string.
  std::string add(const RecordReader& record) {
    double at = kNoNumber;
    for (size_t i = 0; i < record.size(); ++i)
      if (record[i].key == x_) at = record[i].value;
    if (std::isnan(at)) return fmt::format("it has no number \"{}\", the position on the horizontal axis", x_);
    const bool is_epoch = record.type() == "epoch";
    for (size_t i = 0; i < record.size(); ++i) {
      if (is_position(record[i].key)) continue;
      auto& metric = metric_called(record[i].key);
      (is_epoch ? metric.epochs : metric.steps).add(at, record[i].value);
    }
    ++curves_.records;
    return "";
  }

  RunCurves take() { return std::move(curves_); }

 private:
  MetricCurves& metric_called(const std::string& name) {
    const auto found = indices_.find(name);
    if (found != indices_.end()) return curves_.metrics[found->second];
    indices_.emplace(name, curves_.metrics.size());
    return curves_.metrics.emplace_back(MetricCurves{.name = name});
  }

  const std::string x_;
  RunCurves curves_;
  std::unordered_map<std::string, size_t> indices_;
};

/// The lines of a regular file. No pipe is opened: that would block until another process writes to it, or, without
/// blocking, end the wait of a process that opens it for writing.
class LineReader {
 public:
  explicit LineReader(const std::string& path) : path_(path) {
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) fail();
    check_regular(status);
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (descriptor < 0) fail();
    file_.reset(::fdopen(descriptor, "r"));
    if (!file_ || ::fstat(descriptor, &status) != 0) fail();
    check_regular(status);  // it may have been replaced
  }
  ~LineReader() { std::free(buffer_); }
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;

  /// Returns false at the end of the file.
  bool next(std::string& line) {
    errno = 0;
    const auto size = ::getline(&buffer_, &capacity_, file_.get());
    if (size < 0 && std::ferror(file_.get()) != 0) fail();
    if (size < 0) return false;
    has_line_end_ = buffer_[size - 1] == '\n';
    line.assign(buffer_, static_cast<size_t>(size) - (has_line_end_ ? 1 : 0));
    return true;
  }
  /// Whether the last line ended with a newline, not with the file.
  bool has_line_end() const { return has_line_end_; }

 private:
  void check_regular(const struct stat& status) const {
    if (S_ISREG(status.st_mode)) return;
    throw SystemError(
        fmt::format("{} cannot be read: it is not a regular file. Copy the records into a file first.", path_));
  }

  [[noreturn]] void fail() const {
    throw SystemError(fmt::format("{} cannot be read: {}", path_, std::strerror(errno)));
  }

  const std::string path_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_{nullptr, std::fclose};
  char* buffer_ = nullptr;
  size_t capacity_ = 0;
  bool has_line_end_ = false;
};

bool is_blank(const std::string& line) {
  return line.find_first_not_of(" \t\r") == std::string::npos;
}

}  // namespace

const char* key_of(XAxis x) {
  return x == XAxis::kStep ? "step" : x == XAxis::kEpoch ? "epoch" : "seconds";
}

const MetricCurves* RunCurves::find(const std::string& name) const {
  for (const auto& metric : metrics)
    if (metric.name == name) return &metric;
  return nullptr;
}

RunCurves read_metrics(const std::string& path, XAxis x) {
  LineReader file(path);
  RecordReader record;
  CurveCollector curves(x);
  size_t number = 0;
  for (std::string line; file.next(line);) {
    ++number;
    if (is_blank(line)) continue;
    const bool is_valid = record.read(line);
    if (!is_valid && !file.has_line_end()) break;  // cut off
    const auto problem = is_valid ? curves.add(record) : record.problem();
    if (!problem.empty())
      throw Error(
          fmt::format("{}:{}: the line is damaged: {}. Remove the line, or restore the file.", path, number, problem));
  }
  return curves.take();
}

}  // namespace lockstep::plot
