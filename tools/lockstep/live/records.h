#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace lockstep::live {

/// The horizontal axis: the number of a record that is its position.
enum class XAxis { kStep, kEpoch, kTime };

/// The key of that number in a record: "step", "epoch" or "seconds".
const char* key_of(XAxis x);

/// The values of one metric. `values` is NaN where the file has null: the value was not finite.
struct Column {
  std::vector<uint32_t> rows{};  // of the table, ascending
  std::vector<double> values{};  // as many as `rows`
};

/// The records of one type, "step" or "epoch", as columns of numbers. A position that a record does not have is NaN.
struct RecordTable {
  std::vector<double> step{}, epoch{}, seconds{};  // a number for each record
  std::vector<Column> columns{};                   // by number of the metric; metrics of the other type are empty

  size_t size() const { return step.size(); }
  const std::vector<double>& positions(XAxis x) const;
  /// The last finite value of a metric; NaN if there is none.
  double last_value(size_t metric) const;
};

/// The records of a metrics.jsonl. A reader of a growing file passes it in pieces. A line that is no valid record is
/// counted and left out. Not thread-safe.
class Records {
 public:
  /// Reads the complete lines at the beginning of `text` and returns their size in bytes. A last line without an end is
  /// left for the next call, unless it is a complete object.
  size_t append(std::string_view text);

  /// Counts a line that the caller has skipped.
  void add_damaged_line(std::string problem);

  const RecordTable& steps() const { return steps_; }
  const RecordTable& epochs() const { return epochs_; }
  /// The names of the metrics, in order of first appearance. The index is the number of the metric.
  const std::vector<std::string>& metrics() const { return metrics_; }
  /// The number of a metric; -1 if no record has it.
  int find(const std::string& metric) const;
  /// The largest position; NaN if no record has one.
  double last_position(XAxis x) const;

  size_t size() const { return steps_.size() + epochs_.size(); }
  size_t lines() const { return lines_; }
  size_t damaged_lines() const { return damaged_lines_; }
  /// The number, from 1, of the first damaged line, and why it is damaged, as in "it has no "type"".
  size_t first_damaged_line() const { return first_damaged_line_; }
  const std::string& first_problem() const { return first_problem_; }

 private:
  friend class LineScanner;

  struct Field {
    int metric;
    double value;
  };

  void read_line(const char* begin, const char* end);
  int metric_called(std::string_view name);
  void add_record(RecordTable& table, const double (&positions)[3]);

  RecordTable steps_, epochs_;
  std::vector<std::string> metrics_;
  std::unordered_map<std::string, int> numbers_;  // of metrics, by name
  std::vector<Field> fields_;                     // metrics of the line that is being read
  std::vector<std::string> layout_;               // the keys of the last line with their quotes, in order
  std::vector<int> layout_keys_;                  // the meaning of each key, as returned by LineScanner::key_of
  size_t lines_ = 0, damaged_lines_ = 0, first_damaged_line_ = 0;
  std::string first_problem_;
};

}  // namespace lockstep::live
