#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "live/file_text.h"
#include "live/live_files.h"

/// The state of a job, derived from the live files of its run. `lockstep top` and `lockstep ui` show it.
namespace lockstep::live {

enum class RankState { kRunning, kSilent, kFinished, kStopped, kFailed };

/// "running", "silent", "finished", "stopped" or "failed".
const char* name_of(RankState state);

/// A rank: the values of its file, and its derived state. Without a file the values are those of its launcher, or
/// empty.
struct RankView : RankFile {
  RankState state = RankState::kRunning;
  std::string note{};  // "killed by SIGKILL", "no news for 12 s", "in all_reduce for 5 s"; may be empty
  bool is_straggler = false;
  bool has_file = false;
  double age = 0;  // seconds since the file was written; never negative
};

struct NodeView {
  int64_t node = 0, pid = 0;
  std::string host{};
  std::vector<std::string> command{};
  RankState state = RankState::kRunning;  // kFinished: its workers ended; kFailed: one of them failed
  double age = 0;
  int64_t workers = 0;
};

struct JobView {
  std::string job{};  // empty without a launcher
  int64_t attempt = 0;
  double started = 0, updated = 0;  // the earliest start and the latest news; 0 without live files
  double elapsed = 0;               // seconds from `started` to now, or to the last news of a job that is not live
  bool is_live = false;             // a rank is running, or a launcher is running and has written recently
  RankState state = RankState::kSilent;
  int64_t world_size = 0;
  int64_t step = 0, batch = 0, batches = 0;  // of the rank with most steps
  double epoch = 0, epochs = 0;
  std::optional<double> samples_per_second{};  // the sum over the running ranks
  std::vector<RankView> ranks{};               // by number; one for each rank of the job
  std::vector<NodeView> nodes{};               // by number
  std::string report{};                        // which rank failed first, how, and the remedy; may be empty
  std::vector<std::string> problems{};         // files that cannot be read, and why
};

/// Derives the view from the files. Pure.
///
/// The view shows the job with the latest start, in its last attempt; files of other jobs are ignored. A rank has
/// failed if its file or the file of its launcher reports a failure. A rank is silent if it should run and its file is
/// older than 5 seconds. A file from the future is fresh: clocks differ.
///
/// Stragglers are found among the running and silent ranks, if there are two or more. The first rule that applies
/// decides: (1) silent ranks, while another rank blocks in a call; (2) the only rank that is behind in steps, or does
/// not block, while all others block in a call; (3) the rank with the lowest share of communication, if that is 0.15
/// or more below the median of the other ranks: the other ranks wait for it.
JobView make_job_view(const LiveFiles& files, double now);

/// make_job_view() of read_live_files(). `now` is Unix time in seconds. Never throws because of the files.
JobView read_job(const std::filesystem::path& run, double now);

/// The view as JSON, for the dashboard and `lockstep top --json`. Values that are unknown are null.
///
///   job, attempt, started, updated, elapsed, is_live, state, world_size, step, epoch, epochs, batch, batches,
///   samples_per_second, report, problems (list of strings): as in JobView; states by name_of()
///   nodes: list of {node, host, pid, command, state, age, workers}
///   ranks: list, by rank, of
///     rank, state, note, is_straggler, has_file, age, host, pid, local_rank, device, step, epoch, epochs, batch,
///     batches, steps_per_second, samples_per_second, resident_bytes
///     time: {forward, backward, communication, data, other}
///     call: null or {operation, group, number, seconds, where}
///     gpu: null or {name, utilization, memory_used_bytes, memory_total_bytes}
///     failure: null or {kind, message, flight_recorder,
///                       calls: [{what, state, group, site, started_seconds_ago, took_seconds}]}
nlohmann::json to_json(const JobView& view);

}  // namespace lockstep::live
