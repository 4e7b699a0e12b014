#include "plot/metrics_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>

#include <fmt/format.h>

#include <lockstep/error.h>

namespace lockstep::plot {
namespace {

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
    check_regular(status);  // the file may have been replaced
  }
  ~LineReader() { std::free(buffer_); }
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;

  /// `line` is valid until the next call, and has the newline that ends it. Returns false at the end of the file.
  bool next(std::string_view& line) {
    errno = 0;
    const auto size = ::getline(&buffer_, &capacity_, file_.get());
    if (size < 0 && std::ferror(file_.get()) != 0) fail();
    if (size < 0) return false;
    line = {buffer_, static_cast<size_t>(size)};
    return true;
  }

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
};

Series series_of(const live::RecordTable& table, size_t metric, XAxis x) {
  Series series;
  if (metric >= table.columns.size()) return series;
  const auto& column = table.columns[metric];
  for (const auto row : column.rows) series.x.push_back(table.positions(x)[row]);
  series.y = column.values;
  return series;
}

}  // namespace

const MetricCurves* RunCurves::find(const std::string& name) const {
  for (const auto& metric : metrics)
    if (metric.name == name) return &metric;
  return nullptr;
}

RunCurves read_metrics(const std::string& path, XAxis x) {
  LineReader file(path);
  live::Records records;
  size_t lines = 0, steps = 0;
  for (std::string_view line; file.next(line);) {
    const size_t before = records.size();
    if (records.append(line) == 0) break;  // cut off
    ++lines;
    std::string problem = records.first_problem();
    if (records.size() > before) {
      const bool is_step = records.steps().size() > steps;
      steps = records.steps().size();
      if (std::isnan((is_step ? records.steps() : records.epochs()).positions(x).back()))
        problem = fmt::format("it has no number \"{}\", the position on the horizontal axis", key_of(x));
    }
    if (!problem.empty())
      throw Error(
          fmt::format("{}:{}: the line is damaged: {}. Remove the line, or restore the file.", path, lines, problem));
  }
  RunCurves curves{.records = records.size()};
  for (size_t metric = 0; metric < records.metrics().size(); ++metric)
    curves.metrics.push_back(
        {records.metrics()[metric], series_of(records.steps(), metric, x), series_of(records.epochs(), metric, x)});
  return curves;
}

}  // namespace lockstep::plot
