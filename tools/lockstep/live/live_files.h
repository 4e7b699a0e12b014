#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

/// The files that the ranks of a TrainingRun and their launchers write while they run, in the folder `live` of the run.
/// The files are not trusted: a file that is damaged, too large, of a newer format or no regular file results in a
/// description of the problem, never in a crash.
namespace lockstep::live {

/// A call of a group in which a rank blocks.
struct BlockedCall {
  std::string operation{}, group{}, where{};  // "all_reduce", "world", "train.cpp:88"
  int64_t number = 0;
  double seconds = 0;
};

/// Shares of the last interval, each 0 to 1; none if unknown.
struct TimeShares {
  std::optional<double> forward{}, backward{}, communication{}, data{}, other{};
};

struct GpuFigures {
  std::string name{};
  std::optional<double> utilization{};  // 0 to 1
  int64_t memory_used_bytes = 0, memory_total_bytes = 0;
};

/// One of the last calls of a failed rank, as the flight recorder describes it.
struct RecordedCall {
  std::string what{}, state{}, group{}, site{};  // "all_reduce(avg, Float[4])", "running", "world", "train.cpp:32"
  std::optional<double> started_seconds_ago{}, took_seconds{};
};

/// The failure that a rank has written itself.
struct RankFailure {
  std::string kind{}, message{}, flight_recorder{};  // "PeerError"; the path of the flight recorder's file or ""
  std::vector<RecordedCall> calls{};                 // oldest first
};

/// The file of a rank. Times are Unix seconds of the clock of its host.
struct RankFile {
  std::string job{}, host{}, device{};
  int64_t attempt = 0, rank = 0, world_size = 0, local_rank = 0, pid = 0;
  double started = 0, updated = 0;
  std::string reported{};  // "running", "finished", "stopped" or "failed"
  int64_t step = 0, batch = 0, batches = 0;
  double epoch = 0, epochs = 0;  // `epochs` and `batches` are 0 if unknown
  std::optional<double> steps_per_second{}, samples_per_second{};
  TimeShares time{};
  std::optional<BlockedCall> call{};
  std::optional<int64_t> resident_bytes{};
  std::optional<GpuFigures> gpu{};
  std::optional<RankFailure> failure{};
};

/// A worker in the file of its launcher.
struct WorkerEntry {
  int64_t rank = 0, local_rank = 0, pid = 0;
  bool has_ended = false, has_failed = false;
  std::string how{}, uncaught{};  // "killed by SIGKILL"; "std::runtime_error: bad sample 17"
  double seconds = 0;
};

/// The end of the job, as `lockstep run --json` prints it.
struct LaunchSummary {
  int64_t exit_code = 0, restarts = 0;
  double seconds = 0;
  std::string message{}, notice{}, remedy{};
  std::optional<int64_t> culprit_rank{};  // the members below describe this worker
  std::string culprit_host{}, culprit_how{}, culprit_uncaught{};
  int64_t culprit_pid = 0;
  std::vector<std::string> culprit_lines{};  // last lines of its standard error
};

/// The file of the launcher of a node.
struct NodeFile {
  std::string job{}, host{};
  int64_t attempt = 0, node = 0, nodes = 0, pid = 0;
  std::vector<std::string> command{};
  double started = 0, updated = 0;
  bool has_ended = false;
  std::vector<WorkerEntry> workers{};
  std::optional<LaunchSummary> report{};
};

/// The files of one run, by the number in their name. `problems` has a line for each file that cannot be read.
struct LiveFiles {
  std::map<int64_t, RankFile> ranks{};
  std::map<int64_t, NodeFile> nodes{};
  std::map<int64_t, std::string> unreadable_ranks{};  // why
  std::vector<std::string> problems{};
};

/// Parse the text of a file. Throw Error with the reason if the text is not valid. Unknown keys are ignored, and values
/// of an unexpected type are treated as absent, except for the values that every file must have: format, rank or node,
/// updated and state. Pure.
RankFile parse_rank_file(std::string_view text);
NodeFile parse_node_file(std::string_view text);

/// Reads the folder `live` of a run, whose path is canonical (RunFolder). Without that folder all lists are empty.
LiveFiles read_live_files(const std::filesystem::path& run);

}  // namespace lockstep::live
