#include "top/find_run.h"

#include <ctime>
#include <optional>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include <lockstep/error.h>

#include "live/run_folder.h"

namespace lockstep::top {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxLevels = 3;

/// The time at which a live file of a run was last written, in seconds and nanoseconds. Ranks rename their files, which
/// changes the time of the folder.
std::optional<std::pair<time_t, long>> last_write(const live::RunFolder& run) {
  if (!run.has_live_files()) return std::nullopt;
  const auto status = run.status("live");
  if (!status) return std::nullopt;
  return std::pair(status->st_mtim.tv_sec, status->st_mtim.tv_nsec);
}

struct LatestRun {
  std::optional<fs::path> folder{};
  bool has_skipped_links = false;  // a run may be behind them
};

/// The run below `folder` whose live files were written last.
LatestRun latest_run(const fs::path& folder) {
  LatestRun latest;
  std::optional<std::pair<time_t, long>> latest_time;
  std::error_code problem;
  auto entries = fs::recursive_directory_iterator(folder, fs::directory_options::skip_permission_denied, problem);
  for (; !problem && entries != fs::recursive_directory_iterator(); entries.increment(problem)) {
    const auto type = entries->symlink_status(problem).type();
    if (type == fs::file_type::symlink) latest.has_skipped_links = true;
    if (type != fs::file_type::directory) continue;
    const live::RunFolder run(entries->path());
    if (run.has_link("live")) latest.has_skipped_links = true;
    if (run.is_run() || entries.depth() + 1 >= kMaxLevels) entries.disable_recursion_pending();
    const auto time = last_write(run);
    if (!time || (latest_time && *time <= *latest_time)) continue;
    latest.folder = entries->path();
    latest_time = time;
  }
  return latest;
}

}  // namespace

FoundRun find_run(const fs::path& given) {
  const auto named = given.empty() ? fs::path("runs") : given;
  std::error_code problem;
  const auto folder = fs::canonical(named, problem);
  if (problem || !fs::is_directory(folder, problem))
    throw UsageError(given.empty() ? std::string("there is no folder runs here: name the folder of a run")
                                   : fmt::format("{} is not a folder: name the folder of a run", named.string()));
  if (live::RunFolder(folder).is_run()) return {named, folder};
  const auto latest = latest_run(folder);
  if (latest.folder) return {named / latest.folder->lexically_relative(folder), *latest.folder};
  throw UsageError(fmt::format(
      "no run in {} has live files: name the folder that the program passes to its TrainingRun{}", named.string(),
      latest.has_skipped_links ? "; symbolic links below it are not followed: name their targets on the command line"
                               : ""));
}

}  // namespace lockstep::top
