#include "top/find_run.h"

#include <optional>
#include <system_error>

#include <fmt/format.h>

#include <lockstep/error.h>

namespace lockstep::top {
namespace {

constexpr int kMostLevels = 3;

/// The time of the last live file of a run. Ranks rename their files, which changes the folder.
std::optional<std::filesystem::file_time_type> last_news(const std::filesystem::path& run) {
  std::error_code problem;
  if (!std::filesystem::is_directory(run / "live", problem)) return std::nullopt;
  const auto time = std::filesystem::last_write_time(run / "live", problem);
  return problem ? std::nullopt : std::optional(time);
}

bool is_run(const std::filesystem::path& folder) {
  std::error_code problem;
  return std::filesystem::is_directory(folder / "live", problem) ||
         std::filesystem::exists(folder / "metrics.jsonl", problem) ||
         std::filesystem::exists(folder / "summary.json", problem);
}

/// The run below `folder` with the last news.
std::optional<std::filesystem::path> latest_run(const std::filesystem::path& folder) {
  std::optional<std::filesystem::path> latest;
  std::optional<std::filesystem::file_time_type> latest_time;
  std::error_code problem;
  const auto options = std::filesystem::directory_options::skip_permission_denied;
  auto entries = std::filesystem::recursive_directory_iterator(folder, options, problem);
  for (; !problem && entries != std::filesystem::recursive_directory_iterator(); entries.increment(problem)) {
    if (!entries->is_directory(problem)) continue;
    if (is_run(entries->path()) || entries.depth() + 1 >= kMostLevels) entries.disable_recursion_pending();
    const auto time = last_news(entries->path());
    if (!time || (latest_time && *time <= *latest_time)) continue;
    latest = entries->path();
    latest_time = time;
  }
  return latest;
}

}  // namespace

std::filesystem::path find_run(const std::filesystem::path& given) {
  const auto folder = given.empty() ? std::filesystem::path("runs") : given;
  std::error_code problem;
  if (!std::filesystem::is_directory(folder, problem))
    throw UsageError(given.empty() ? std::string("there is no folder runs here: name the folder of a run")
                                   : fmt::format("{} is not a folder: name the folder of a run", folder.string()));
  if (is_run(folder)) return folder;
  if (auto run = latest_run(folder)) return *run;
  throw UsageError(fmt::format(
      "no run in {} has live files: name the folder that the program passes to its TrainingRun", folder.string()));
}

}  // namespace lockstep::top
