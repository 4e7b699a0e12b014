#include "ui/find_runs.h"

#include <sys/stat.h>

#include <algorithm>
#include <map>
#include <set>

#include <lockstep/error.h>

#include "live/run_folder.h"

namespace lockstep::ui {
namespace {

namespace fs = std::filesystem;

constexpr const char* kCheckpoints = "checkpoints";

class RunSearch {
 public:
  void add(const fs::path& folder, int depth) {
    const live::RunFolder opened(folder);
    if (opened.is_run()) {
      folders_.insert(folder);
      return;
    }
    if (opened.has_link("live")) has_skipped_links_ = true;
    if (depth == 0) return;
    std::error_code error;
    for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
      std::error_code ignored;
      if (entry->path().filename().string().starts_with('.')) continue;
      const auto type = entry->symlink_status(ignored).type();
      if (type == fs::file_type::symlink) has_skipped_links_ = true;
      if (type == fs::file_type::directory) add(entry->path(), depth - 1);
    }
  }

  FoundRuns result() const { return {{folders_.begin(), folders_.end()}, has_skipped_links_}; }

 private:
  std::set<fs::path> folders_;
  bool has_skipped_links_ = false;
};

/// Empty if the folder cannot be read; the description of the run names links among its problems.
std::vector<std::string> names_in(const live::RunFolder& run, const std::string& folder) {
  try {
    return run.names(folder);
  } catch (const Error&) {
    return {};
  }
}

bool is_shard(const std::string& name) {
  return name.find(".shard-") != name.npos;
}

}  // namespace

FoundRuns find_runs(const std::vector<fs::path>& folders) {
  RunSearch search;
  for (const auto& folder : folders) search.add(folder, kMaxRunDepth);
  return search.result();
}

std::vector<CheckpointFile> list_checkpoints(const fs::path& path) {
  const live::RunFolder run(path);
  std::vector<CheckpointFile> files;
  std::map<ino_t, std::string> numbered;  // to find the checkpoint that best.pt is a hard link to
  ino_t best = 0;
  for (const auto& name : names_in(run, kCheckpoints)) {
    if (name.starts_with('.') || !name.ends_with(".pt") || is_shard(name)) continue;
    const auto status = run.status(fs::path(kCheckpoints) / name);
    if (!status || !S_ISREG(status->st_mode)) continue;
    const bool is_best = name == "best.pt";
    if (is_best)
      best = status->st_ino;
    else
      numbered[status->st_ino] = name;
    files.push_back({.name = name,
                     .is_best = is_best,
                     .bytes = static_cast<uintmax_t>(status->st_size),
                     .saved = live::modified_at(*status)});
  }
  std::sort(files.begin(), files.end(), [](const CheckpointFile& a, const CheckpointFile& b) {
    return a.is_best != b.is_best ? a.is_best : a.name > b.name;
  });
  for (auto& file : files) {
    if (file.is_best && numbered.contains(best)) file.best_of = numbered[best];
    if (!file.is_best && best != 0 && numbered.contains(best) && numbered[best] == file.name) file.is_best = true;
  }
  return files;
}

}  // namespace lockstep::ui
