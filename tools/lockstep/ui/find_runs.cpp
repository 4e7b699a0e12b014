#include "ui/find_runs.h"

#include <sys/stat.h>

#include <algorithm>
#include <map>
#include <set>

namespace lockstep::ui {
namespace {

namespace fs = std::filesystem;

void add_runs(const fs::path& folder, int depth, std::set<fs::path>& found) {
  if (is_run(folder)) {
    found.insert(folder);
    return;
  }
  if (depth == 0) return;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    std::error_code ignored;
    if (entry->path().filename().string().starts_with('.')) continue;
    if (entry->symlink_status(ignored).type() == fs::file_type::directory) add_runs(entry->path(), depth - 1, found);
  }
}

double seconds_of(const timespec& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

bool is_shard(const std::string& name) {
  return name.find(".shard-") != name.npos;
}

}  // namespace

bool is_run(const fs::path& folder) {
  std::error_code ignored;
  return fs::exists(folder / "metrics.jsonl", ignored) || fs::exists(folder / "summary.json", ignored) ||
         fs::is_directory(folder / "live", ignored);
}

std::vector<fs::path> find_runs(const std::vector<fs::path>& folders) {
  std::set<fs::path> found;
  for (const auto& folder : folders) {
    std::error_code error;
    auto path = fs::canonical(folder, error);
    if (error) continue;
    add_runs(path, kDeepestRun, found);
  }
  return {found.begin(), found.end()};
}

std::vector<CheckpointFile> list_checkpoints(const fs::path& run) {
  std::vector<CheckpointFile> files;
  std::map<ino_t, std::string> names;  // to find the checkpoint that best.pt is a hard link to
  ino_t best = 0;
  std::error_code error;
  for (fs::directory_iterator entry(run / "checkpoints", error), end; !error && entry != end; entry.increment(error)) {
    const auto name = entry->path().filename().string();
    if (name.starts_with('.') || entry->path().extension() != ".pt" || is_shard(name)) continue;
    struct stat status {};
    if (::stat(entry->path().c_str(), &status) != 0 || !S_ISREG(status.st_mode)) continue;
    const bool is_best = name == "best.pt";
    if (is_best)
      best = status.st_ino;
    else
      names[status.st_ino] = name;
    files.push_back({.name = name,
                     .is_best = is_best,
                     .bytes = static_cast<uintmax_t>(status.st_size),
                     .saved = seconds_of(status.st_mtim)});
  }
  std::sort(files.begin(), files.end(), [](const CheckpointFile& a, const CheckpointFile& b) {
    return a.is_best != b.is_best ? a.is_best : a.name > b.name;
  });
  for (auto& file : files) {
    if (file.is_best && names.contains(best)) file.best_of = names[best];
    if (!file.is_best && best != 0 && names.contains(best) && names[best] == file.name) file.is_best = true;
  }
  return files;
}

}  // namespace lockstep::ui
