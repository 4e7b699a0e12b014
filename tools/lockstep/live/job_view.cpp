#include "live/job_view.h"

#include <algorithm>
#include <cmath>
#include <map>

#include <fmt/format.h>

// The view is made in four steps: choose the job among the files, make a view of each of its ranks, mark the
// stragglers, and sum up the job.

namespace lockstep::live {
namespace {

constexpr double kSilentSeconds = 5;      // a rank writes its file once a second
constexpr double kSurelyLateSeconds = 2;  // a longer wait of the other ranks is not only due to files of different ages
constexpr double kWaitingShare = 0.15;
constexpr int64_t kMaxMissingRanks = 1 << 16;

double age_of(double updated, double now) {
  return std::max(0.0, now - updated);
}

/// "12 s", "3 min", "5 h".
std::string duration_text(double seconds) {
  if (seconds < 120) return fmt::format("{:.0f} s", seconds);
  if (seconds < 7200) return fmt::format("{:.0f} min", seconds / 60);
  return seconds < 172800 ? fmt::format("{:.0f} h", seconds / 3600) : fmt::format("{:.0f} days", seconds / 86400);
}

std::string no_news(double age) {
  return "no news for " + duration_text(age);
}

// --- the job

/// Identifies a start of a run: the values that its files have in common.
struct StartId {
  std::string job{};
  int64_t attempt = 0;
  double started = -1;

  template <class File>
  bool is_of(const File& file) const {
    return file.job == job && file.attempt == attempt;
  }

  /// Chooses the job with the latest start, and its last attempt.
  template <class File>
  void consider(const File& file) {
    if (file.job == job) attempt = std::max(attempt, file.attempt);
    if (file.job != job && file.started > started) *this = {file.job, file.attempt, file.started};
    if (file.job == job) started = std::max(started, file.started);
  }
};

StartId choose_start(const LiveFiles& files) {
  StartId start;
  for (const auto& [number, file] : files.ranks) start.consider(file);
  for (const auto& [number, file] : files.nodes) start.consider(file);
  return start;
}

/// A worker with the launcher that started it.
struct KnownWorker {
  const WorkerEntry* worker = nullptr;
  const NodeFile* node = nullptr;
};

// --- ranks

/// Why a worker ended, in a few words.
std::string end_note(const WorkerEntry& worker) {
  if (worker.uncaught.empty()) return printable(worker.how);
  return printable(worker.uncaught);
}

std::string failure_note(const RankFile& file) {
  if (!file.failure) return "";
  const auto& [kind, message, flight_recorder, calls] = *file.failure;
  const auto first_line = printable(message.substr(0, message.find('\n')));
  return kind.empty() ? first_line : fmt::format("{}: {}", printable(kind), first_line);
}

std::string call_note(const BlockedCall& call) {
  return fmt::format("in {} for {}", call.operation.empty() ? "a call" : printable(call.operation),
                     duration_text(call.seconds));
}

void set_state(RankView& rank, RankState state, std::string note) {
  rank.state = state;
  rank.note = std::move(note);
}

/// Sets the state of a rank that has written a file.
void set_state_from_file(RankView& rank, const KnownWorker& known) {
  const bool has_ended = known.worker != nullptr && known.worker->has_ended;
  if (has_ended && known.worker->has_failed) {
    auto note = failure_note(rank);  // more specific than "exit code 1"
    set_state(rank, RankState::kFailed, note.empty() ? end_note(*known.worker) : std::move(note));
  } else if (rank.reported == "failed") {
    set_state(rank, RankState::kFailed, failure_note(rank));
  } else if (rank.reported == "stopped") {
    set_state(rank, RankState::kStopped, "");
  } else if (rank.reported == "finished" || has_ended) {
    set_state(rank, RankState::kFinished, "");
  } else if (rank.age > kSilentSeconds) {
    set_state(rank, RankState::kSilent, no_news(rank.age));
  } else {
    set_state(rank, RankState::kRunning, rank.call ? call_note(*rank.call) : "");
  }
}

/// Sets the state of a rank whose file is missing or cannot be read, from the file of its launcher.
void set_state_from_launcher(RankView& rank, const KnownWorker& known, const LiveFiles& files, double now) {
  const auto unreadable = files.unreadable_ranks.find(rank.rank);
  const auto missing = unreadable == files.unreadable_ranks.end() ? "no file yet" : "its live file cannot be read";
  if (known.worker == nullptr) return set_state(rank, RankState::kSilent, missing);
  const auto& [worker, node] = known;
  rank.host = node->host;
  rank.pid = worker->pid;
  rank.local_rank = worker->local_rank;
  rank.started = node->started;
  rank.age = age_of(node->updated, now);
  if (worker->has_ended && worker->has_failed) return set_state(rank, RankState::kFailed, end_note(*worker));
  if (worker->has_ended) return set_state(rank, RankState::kFinished, "");
  if (rank.age > kSilentSeconds) return set_state(rank, RankState::kSilent, no_news(rank.age));
  set_state(rank, RankState::kRunning, missing);
}

RankView view_rank(int64_t number, const LiveFiles& files, const StartId& start, const KnownWorker& known, double now) {
  RankView rank;
  const auto found = files.ranks.find(number);
  if (found != files.ranks.end() && start.is_of(found->second)) {
    static_cast<RankFile&>(rank) = found->second;
    rank.has_file = true;
    rank.age = age_of(rank.updated, now);
    set_state_from_file(rank, known);
  } else {
    rank.rank = number;
    set_state_from_launcher(rank, known, files, now);
  }
  return rank;
}

/// Views of all ranks of the job: ranks that have a file or a worker, and ranks below world_size.
void view_ranks(JobView& job, const LiveFiles& files, const StartId& start, double now) {
  std::map<int64_t, KnownWorker> known;
  for (const auto& [number, file] : files.ranks) {
    if (!start.is_of(file)) continue;
    known[number];
    job.world_size = std::max(job.world_size, file.world_size);
  }
  for (const auto& [number, node] : files.nodes)
    if (start.is_of(node))
      for (const auto& worker : node.workers) known[worker.rank] = {&worker, &node};
  if (known.empty() && files.unreadable_ranks.empty()) return;
  if (known.empty()) known[files.unreadable_ranks.begin()->first];
  job.world_size = std::max(job.world_size, known.rbegin()->first + 1);
  if (job.world_size <= kMaxMissingRanks)
    for (int64_t rank = 0; rank < job.world_size; ++rank) known[rank];
  job.ranks.reserve(known.size());
  for (const auto& [number, worker] : known) job.ranks.push_back(view_rank(number, files, start, worker, now));
}

// --- stragglers

/// The median; of an even number of values, the mean of the two middle values. `values` is not empty.
double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

/// Rule 1: silent ranks, while another rank blocks in a call.
bool mark_silent(const std::vector<RankView*>& active) {
  const bool others_block = std::any_of(active.begin(), active.end(), [](const RankView* rank) {
    return rank->state == RankState::kRunning && rank->call.has_value();
  });
  bool is_marked = false;
  for (auto* rank : active)
    if (others_block && rank->state == RankState::kSilent) is_marked = rank->is_straggler = true;
  return is_marked;
}

/// Whether `rank` is late for a call in which `other` blocks.
bool is_late_for(const RankView& rank, const RankView& other) {
  if (!other.call) return false;
  if (rank.step != other.step) return rank.step < other.step;
  return !rank.call && other.call->seconds >= kSurelyLateSeconds;
}

/// Rule 2: the only rank that is behind in steps, or does not block, while all others block in a call.
bool mark_behind(const std::vector<RankView*>& active) {
  auto* last = *std::min_element(active.begin(), active.end(), [](const RankView* a, const RankView* b) {
    return a->step != b->step ? a->step < b->step : !a->call && b->call;
  });
  last->is_straggler = last->has_file && std::all_of(active.begin(), active.end(), [&](const RankView* rank) {
                         return rank == last || is_late_for(*last, *rank);
                       });
  return last->is_straggler;
}

/// Rule 3: the rank with the lowest share of communication.
void mark_by_shares(const std::vector<RankView*>& active) {
  std::vector<RankView*> known;
  std::copy_if(active.begin(), active.end(), std::back_inserter(known),
               [](const RankView* rank) { return rank->time.communication.has_value(); });
  if (known.size() < 2) return;
  const auto lowest = std::min_element(known.begin(), known.end(), [](const RankView* a, const RankView* b) {
    return *a->time.communication < *b->time.communication;
  });
  std::vector<double> others;
  for (const auto* rank : known)
    if (rank != *lowest) others.push_back(*rank->time.communication);
  constexpr double kRounding = 1e-9;
  (*lowest)->is_straggler = *(*lowest)->time.communication <= median(std::move(others)) - kWaitingShare + kRounding;
}

void mark_stragglers(std::vector<RankView>& ranks) {
  std::vector<RankView*> active;
  for (auto& rank : ranks)
    if (rank.state == RankState::kRunning || rank.state == RankState::kSilent) active.push_back(&rank);
  const bool is_any_running = std::any_of(active.begin(), active.end(),
                                          [](const RankView* rank) { return rank->state == RankState::kRunning; });
  if (active.size() < 2 || !is_any_running) return;
  if (!mark_silent(active) && !mark_behind(active)) mark_by_shares(active);
  for (auto* rank : active)
    if (rank->is_straggler && rank->note.empty()) rank->note = "the others wait for it";
}

// --- the summary

void view_nodes(JobView& job, const LiveFiles& files, const StartId& start, double now) {
  for (const auto& [number, file] : files.nodes) {
    if (file.job != start.job) continue;
    NodeView node{.node = number,
                  .pid = file.pid,
                  .host = file.host,
                  .command = file.command,
                  .age = age_of(file.updated, now),
                  .workers = static_cast<int64_t>(file.workers.size())};
    const bool has_failed = std::any_of(file.workers.begin(), file.workers.end(),
                                        [](const WorkerEntry& worker) { return worker.has_failed; });
    node.state = file.has_ended              ? has_failed ? RankState::kFailed : RankState::kFinished
                 : node.age > kSilentSeconds ? RankState::kSilent
                                             : RankState::kRunning;
    job.nodes.push_back(std::move(node));
  }
}

void set_times(JobView& job, const LiveFiles& files, const StartId& start, double now) {
  const auto consider = [&](const auto& file) {
    if (!start.is_of(file)) return;
    job.started = job.started == 0 ? file.started : std::min(job.started, file.started);
    job.updated = std::max(job.updated, file.updated);
  };
  for (const auto& [number, file] : files.ranks) consider(file);
  for (const auto& [number, file] : files.nodes) consider(file);
  job.elapsed = std::max(0.0, (job.is_live ? now : job.updated) - job.started);
}

RankState state_of_job(const JobView& job) {
  const auto has = [&](RankState state) {
    return std::any_of(job.ranks.begin(), job.ranks.end(), [&](const RankView& rank) { return rank.state == state; });
  };
  for (auto state : {RankState::kFailed, RankState::kRunning, RankState::kSilent, RankState::kStopped})
    if (has(state)) return state;
  return job.ranks.empty() ? RankState::kSilent : RankState::kFinished;
}

void set_progress(JobView& job) {
  const RankView* first = nullptr;  // the rank with most steps
  for (const auto& rank : job.ranks) {
    if (rank.has_file && (first == nullptr || rank.step > first->step)) first = &rank;
    if (rank.state == RankState::kRunning && rank.samples_per_second)
      job.samples_per_second = job.samples_per_second.value_or(0) + *rank.samples_per_second;
  }
  if (first == nullptr) return;
  job.step = first->step;
  job.batch = first->batch;
  job.batches = first->batches;
  job.epoch = first->epoch;
  job.epochs = first->epochs;
}

/// The report of the launcher in words; empty after a success.
std::string launcher_report(const LaunchSummary& report) {
  std::string words = printable(report.message);
  if (report.culprit_rank) {
    words = fmt::format("rank {} (pid {} on {}) failed first: {}", *report.culprit_rank, report.culprit_pid,
                        printable(report.culprit_host), printable(report.culprit_how));
    if (!report.culprit_uncaught.empty()) words += "; uncaught " + printable(report.culprit_uncaught);
  }
  if (!words.empty() && !report.remedy.empty()) words += ". What to do: " + printable(report.remedy);
  return words;
}

/// How likely a failure is a consequence of another failure.
int consequence_level(const RankView& rank) {
  if (!rank.failure) return 0;  // the rank ended without reporting a failure
  return rank.failure->kind == "PeerError" || rank.failure->kind == "TimeoutError" ? 2 : 1;
}

/// Describes which rank failed, and why. The launcher's report is preferred to the files of the ranks.
std::string report_of_job(const JobView& job, const LiveFiles& files, const StartId& start) {
  for (const auto& [number, node] : files.nodes)
    if (node.report && node.job == start.job)
      if (auto words = launcher_report(*node.report); !words.empty()) return words;
  const RankView* culprit = nullptr;
  for (const auto& rank : job.ranks)
    if (rank.state == RankState::kFailed &&
        (culprit == nullptr || consequence_level(rank) < consequence_level(*culprit)))
      culprit = &rank;
  if (culprit == nullptr) return "";
  return fmt::format("rank {}: {}", culprit->rank, culprit->note.empty() ? "failed" : culprit->note);
}

}  // namespace

const char* name_of(RankState state) {
  switch (state) {
    case RankState::kRunning:
      return "running";
    case RankState::kSilent:
      return "silent";
    case RankState::kFinished:
      return "finished";
    case RankState::kStopped:
      return "stopped";
    case RankState::kFailed:
      return "failed";
  }
  return "";
}

JobView make_job_view(const LiveFiles& files, double now) {
  JobView job;
  const auto start = choose_start(files);
  job.job = start.job;
  job.attempt = start.attempt;
  job.problems = files.problems;
  view_ranks(job, files, start, now);
  mark_stragglers(job.ranks);
  view_nodes(job, files, start, now);
  const auto is_running = [](const auto& part) { return part.state == RankState::kRunning; };
  job.is_live = std::any_of(job.ranks.begin(), job.ranks.end(), is_running) ||
                std::any_of(job.nodes.begin(), job.nodes.end(), is_running);
  job.state = state_of_job(job);
  set_times(job, files, start, now);
  set_progress(job);
  job.report = report_of_job(job, files, start);
  return job;
}

JobView read_job(const std::filesystem::path& run, double now) {
  return make_job_view(read_live_files(run), now);
}

}  // namespace lockstep::live
