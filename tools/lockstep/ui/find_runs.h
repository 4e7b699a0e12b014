#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace lockstep::ui {

/// Depth below a given folder up to which runs are searched.
inline constexpr int kMaxRunDepth = 3;

struct FoundRuns {
  std::vector<std::filesystem::path> folders{};  // canonical paths, sorted
  bool has_skipped_links = false;                // a run may be behind them
};

/// The runs among these folders, whose paths are canonical, and up to kMaxRunDepth levels below them, each run once.
/// Runs inside of a run, hidden folders, and links are left out. Folders that cannot be read have no runs.
FoundRuns find_runs(const std::vector<std::filesystem::path>& folders);

/// A file of a checkpoint folder.
struct CheckpointFile {
  std::string name{};
  bool is_best = false;
  std::string best_of{};  // of best.pt: the name of the checkpoint that it links to, or empty
  uintmax_t bytes = 0;
  double saved = 0;  // Unix time in seconds
};

/// The checkpoints of a run, without shards, links and unfinished files, best.pt first, then the newest number first.
std::vector<CheckpointFile> list_checkpoints(const std::filesystem::path& run);

}  // namespace lockstep::ui
