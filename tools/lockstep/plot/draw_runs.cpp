#include "plot/draw_runs.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <lockstep/error.h>

#include "plot/curves_svg.h"
#include "plot/run_names.h"

namespace lockstep::plot {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFileName = "metrics.jsonl";

std::string counted(size_t count, const char* what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

/// A folder below `folder` that is a run; empty if there is none.
fs::path run_below(const fs::path& folder) {
  std::error_code ignored;
  std::set<fs::path> found;
  for (const auto& entry : fs::directory_iterator(folder, ignored))
    if (fs::exists(entry.path() / kFileName, ignored)) found.insert(entry.path());
  return found.empty() ? fs::path() : *found.begin();
}

/// The file with the records of a run.
std::string metrics_file_of(const std::string& run) {
  std::error_code error;
  const auto status = fs::status(run, error);
  if (!fs::exists(status)) throw UsageError(fmt::format("{} does not exist: name the folder of a run", run));
  if (!fs::is_directory(status)) return run;
  const auto file = fs::path(run) / kFileName;
  if (fs::exists(file, error)) return file;
  if (const auto below = run_below(run); !below.empty())
    throw UsageError(fmt::format("{} has no {}, but {} has one: name the folders of runs, as in {}", run, kFileName,
                                 below.string(), (fs::path(run) / "*").string()));
  throw UsageError(fmt::format("{} has no {}: name the folder of a run", run, kFileName));
}

/// Throws UsageError if two arguments are the same file.
void check_distinct(const std::vector<std::string>& files) {
  std::set<fs::path> seen;
  for (const auto& file : files)
    if (!seen.insert(fs::absolute(file).lexically_normal()).second)
      throw UsageError(fmt::format("{} is given twice: name each run once", file));
}

std::vector<std::string> names_for(const PlotArguments& arguments) {
  if (arguments.names.empty()) return names_of_runs(arguments.runs);
  if (arguments.names.size() != arguments.runs.size())
    throw UsageError(fmt::format("--names has {}, but there are {}: give one name for each run",
                                 counted(arguments.names.size(), "name"), counted(arguments.runs.size(), "run")));
  return arguments.names;
}

std::vector<Run> read_runs(const PlotArguments& arguments) {
  std::vector<std::string> files;
  for (const auto& run : arguments.runs) files.push_back(metrics_file_of(run));
  check_distinct(files);
  const auto names = names_for(arguments);
  std::vector<Run> runs;
  std::vector<std::string> without_records;
  for (size_t i = 0; i < files.size(); ++i) {
    runs.push_back({names[i], read_metrics(files[i], arguments.x)});
    if (runs.back().curves.records == 0) without_records.push_back(files[i]);
  }
  if (without_records.size() == runs.size())
    throw Error(
        fmt::format("no records in {}: wait until the training has written some", fmt::join(without_records, ", ")));
  for (const auto& file : without_records)
    std::cerr << fmt::format("lockstep plot: note: {} has no records yet\n", file);
  return runs;
}

/// The metrics of all runs, in order of first appearance.
std::vector<std::string> metrics_in(const std::vector<Run>& runs) {
  std::vector<std::string> names;
  for (const auto& run : runs)
    for (const auto& metric : run.curves.metrics)
      if (std::find(names.begin(), names.end(), metric.name) == names.end()) names.push_back(metric.name);
  return names;
}

std::vector<std::string> metrics_to_draw(const std::vector<std::string>& chosen, const std::vector<Run>& runs) {
  const auto present = metrics_in(runs);
  if (present.empty()) throw Error("the records have no metrics, only positions: log a metric, such as loss");
  if (chosen.empty()) return present;
  std::vector<std::string> names;
  for (const auto& name : chosen) {
    if (std::find(present.begin(), present.end(), name) == present.end())
      throw UsageError(fmt::format("no run has the metric '{}': use some of {}", name, fmt::join(present, ", ")));
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return names;
}

[[noreturn]] void refuse_to_write(const std::string& file) {
  throw SystemError(fmt::format("{} cannot be written: {}", file, std::strerror(errno)));
}

bool write_and_close(int descriptor, const std::string& text) {
  size_t written = 0;
  while (written < text.size()) {
    const auto count = ::write(descriptor, text.data() + written, text.size() - written);
    if (count < 0 && errno != EINTR) break;
    written += count < 0 ? 0 : static_cast<size_t>(count);
  }
  const int error = errno;
  const bool is_closed = ::close(descriptor) == 0;
  if (written < text.size()) errno = error;
  return written == text.size() && is_closed;
}

/// The permissions of the file, or of a new file.
mode_t mode_of(const std::string& file) {
  struct stat status {};
  if (::stat(file.c_str(), &status) == 0) return status.st_mode & 0777;
  const mode_t mask = ::umask(0);
  ::umask(mask);
  return 0666 & ~mask;
}

/// Writes a new file beside `file` and renames it.
void replace_file(const std::string& file, const std::string& text) {
  auto temporary = file + ".XXXXXX";
  const auto mode = mode_of(file);
  const int descriptor = ::mkstemp(temporary.data());
  if (descriptor < 0) refuse_to_write(file);
  const bool is_written = ::fchmod(descriptor, mode) == 0;
  if (write_and_close(descriptor, text) && is_written && ::rename(temporary.c_str(), file.c_str()) == 0) return;
  const int error = errno;
  ::unlink(temporary.c_str());
  errno = error;
  refuse_to_write(file);
}

void write_picture(const std::string& file, const std::string& text) {
  std::error_code ignored;
  if (fs::is_directory(file, ignored)) throw UsageError(fmt::format("--output is {}, a folder: name a file", file));
  if (const auto status = fs::status(file, ignored); fs::exists(status) && !fs::is_regular_file(status)) {
    const int descriptor = ::open(file.c_str(), O_WRONLY | O_CLOEXEC);  // a pipe or a device is not replaced
    if (descriptor < 0 || !write_and_close(descriptor, text)) refuse_to_write(file);
    return;
  }
  const auto target = fs::is_symlink(file, ignored) ? fs::weakly_canonical(file, ignored).string() : file;
  replace_file(target.empty() ? file : target, text);
}

}  // namespace

void draw_runs(const PlotArguments& arguments) {
  const auto runs = read_runs(arguments);
  const CurvesStyle style{.metrics = metrics_to_draw(arguments.metrics, runs),
                          .x = arguments.x,
                          .smoothing = arguments.smoothing,
                          .is_logarithmic = arguments.is_logarithmic,
                          .title = arguments.title};
  const auto picture = curves_svg(runs, style);
  const bool is_stdout = arguments.output == "-";
  if (!is_stdout)
    write_picture(arguments.output, picture);
  else if (!(std::cout << picture << std::flush))
    refuse_to_write("stdout");
  (is_stdout ? std::cerr : std::cout) << fmt::format("{}: {}, {}\n", is_stdout ? "stdout" : arguments.output,
                                                     counted(runs.size(), "run"),
                                                     counted(style.metrics.size(), "metric"))
                                      << std::flush;
}

}  // namespace lockstep::plot
