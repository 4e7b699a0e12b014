#include "ui/run_catalog.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <tuple>

#include <fmt/format.h>

#include "base/live_folder.h"
#include "base/start_thread.h"
#include "live/job_view.h"
#include "plot/run_names.h"
#include "ui/find_runs.h"

namespace lockstep::ui {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using namespace std::chrono_literals;

constexpr auto kInterval = 400ms;
constexpr int kFolderInterval = 5;    // number of intervals between two searches for new runs
constexpr double kStillWriting = 15;  // seconds without a new record after which a run counts as interrupted
constexpr size_t kMaxReaders = 4;

/// JSON has no NaN.
Json finite(double value) {
  return std::isfinite(value) ? Json(value) : Json(nullptr);
}

/// The last values of all metrics: of epochs if there are any, else of steps.
Json last_values(const Records& records) {
  Json values = Json::object();
  for (size_t i = 0; i < records.metrics().size(); ++i) {
    const double of_epochs = records.epochs().last_value(i);
    values[records.metrics()[i]] = finite(std::isfinite(of_epochs) ? of_epochs : records.steps().last_value(i));
  }
  return values;
}

std::vector<fs::path> canonical(const std::vector<fs::path>& folders) {
  std::vector<fs::path> paths;
  for (const auto& folder : folders) paths.push_back(fs::canonical(folder));
  return paths;
}

std::string counted_lines(size_t count) {
  return count == 1 ? "1 damaged line" : fmt::format("{} damaged lines", count);
}

}  // namespace

Run::Run(int id, fs::path folder)
    : id_(id),
      folder_(std::move(folder)),
      metrics_(folder_, "metrics.jsonl"),
      name_(folder_.filename()),
      settings_("settings.json"),
      summary_("summary.json") {}

/// The state in one word: from the live files of the ranks if there are any, else from the summary and the age of the
/// records.
std::string Run::state(const live::RunFolder& folder, double now) const {
  if (!exists_) return "removed";
  const bool has_ranks = live_.is_object() && !live_["ranks"].empty();
  const std::string of_ranks = has_ranks ? live_.value("state", "") : "";
  if (of_ranks == "running" || of_ranks == "silent" || of_ranks == "failed" || of_ranks == "stopped") return of_ranks;
  if (summary_.value().is_object()) {
    const auto status = summary_.value().value("status", Json());
    return status == "stopped early" ? "stopped early" : "complete";
  }
  if (of_ranks == "finished") return "complete";
  return now - changed_at(folder, "metrics.jsonl") < kStillWriting ? "running" : "interrupted";
}

bool Run::read_live(const live::RunFolder& folder, double now) {
  const auto stamp = stamp_of(folder, "live");
  const bool is_live = live_.is_object() && live_.value("is_live", false);
  if (stamp == live_stamp_ && !is_live) return false;
  live_stamp_ = stamp;
  Json read = stamp.empty() ? Json(nullptr) : live::to_json(live::read_job(folder_, now));
  const bool has_changed = read != live_;
  live_ = std::move(read);
  return has_changed;
}

Run::Look Run::read_files(double now) {
  const live::RunFolder folder(folder_);
  const std::lock_guard lock(mutex_);
  const bool settings_changed = settings_.read_again(folder), summary_changed = summary_.read_again(folder);
  read_live(folder, now);  // the page requests the ranks separately; this function needs only the state
  const double modified = std::max(changed_at(folder, "metrics.jsonl"), changed_at(folder, "live"));
  std::vector<std::string> links;
  for (const auto* name : {"live", "checkpoints"})
    if (folder.has_link(name)) links.emplace_back(name);
  const auto before = std::tuple(std::exchange(state_, state(folder, now)), std::exchange(modified_, modified),
                                 std::exchange(links_, std::move(links)));
  return {.has_changed = settings_changed || summary_changed || before != std::tie(state_, modified_, links_),
          .metrics_stamp = stamp_of(folder, "metrics.jsonl")};
}

std::string Run::live() const {
  const std::lock_guard lock(mutex_);
  return live_.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Json Run::description() const {
  Json run;
  metrics_.with_records([&](const Records& records) {
    run["records"] = records.size();
    run["metrics"] = records.metrics();
    run["last"] = last_values(records);
    run["step"] = finite(records.last_position(live::XAxis::kStep));
    run["epoch"] = finite(records.last_position(live::XAxis::kEpoch));
    run["seconds"] = finite(records.last_position(live::XAxis::kTime));
    run["problems"] = Json::array();
    if (records.damaged_lines() > 0)
      run["problems"].push_back(fmt::format("metrics.jsonl has {}, which are left out; the first is line {}: {}",
                                            counted_lines(records.damaged_lines()), records.first_damaged_line(),
                                            records.first_problem()));
  });
  run["id"] = id_;
  run["path"] = folder_.string();
  run["version"] = version();
  run["reading"] = !is_read_;
  const std::lock_guard lock(mutex_);
  run["name"] = name_;
  run["state"] = state_;
  run["is_live"] = live_.is_object() && live_.value("is_live", false);
  run["has_ranks"] = live_.is_object() && !live_.value("ranks", Json::array()).empty();
  run["settings"] = settings_.value();
  run["summary"] = summary_.value();
  run["changed"] = modified_;
  for (const auto& name : links_) run["problems"].push_back(fmt::format("{}: {}", name, live::kLinkProblem));
  for (const auto& problem : {metrics_.problem(), settings_.problem(), summary_.problem()})
    if (!problem.empty()) run["problems"].push_back(problem);
  return run;
}

RunCatalog::RunCatalog(const std::vector<fs::path>& folders) : folders_(canonical(folders)) {
  look_for_runs();
  threads_.push_back(start_thread("watching runs", [this] { watch(); }));
  const auto readers = std::clamp<size_t>(std::thread::hardware_concurrency(), 1, kMaxReaders);
  for (size_t i = 0; i < readers; ++i) threads_.push_back(start_thread("reading metrics", [this] { read_metrics(); }));
}

RunCatalog::~RunCatalog() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_all();
  for (auto& thread : threads_) thread.join();
}

std::vector<std::shared_ptr<const Run>> RunCatalog::runs() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<const Run>> result;
  for (const auto& [folder, run] : runs_) result.push_back(run);
  return result;
}

std::shared_ptr<const Run> RunCatalog::find(int id) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [folder, run] : runs_)
    if (run->id() == id) return run;
  return nullptr;
}

Json RunCatalog::descriptions() const {
  Json result{{"runs", Json::array()}, {"reading", false}};
  {
    const std::lock_guard lock(mutex_);
    result["has_skipped_links"] = has_skipped_links_;
  }
  for (const auto& run : runs()) {
    result["runs"].push_back(run->description());
    if (result["runs"].back()["reading"] == true) result["reading"] = true;
  }
  return result;
}

/// Runs have the shortest names that distinguish them, so a new run may change the names of other runs.
void RunCatalog::name_runs() {
  std::vector<std::string> paths;
  for (const auto& [folder, run] : runs_) paths.push_back(folder);
  const auto names = plot::names_of_runs(paths);
  size_t i = 0;
  for (const auto& [folder, run] : runs_) {
    const std::lock_guard lock(run->mutex_);
    run->name_ = names[i++];
  }
}

void RunCatalog::look_for_runs() {
  const auto found = find_runs(folders_);
  const std::lock_guard lock(mutex_);
  bool has_changed = std::exchange(has_skipped_links_, found.has_skipped_links) != found.has_skipped_links;
  for (const auto& folder : found.folders) {
    if (runs_.contains(folder)) continue;
    runs_[folder] = std::make_shared<Run>(static_cast<int>(runs_.size()), folder);
    has_changed = true;
  }
  for (const auto& [folder, run] : runs_) {
    const bool exists = std::binary_search(found.folders.begin(), found.folders.end(), folder);
    const std::lock_guard run_lock(run->mutex_);
    has_changed = has_changed || run->exists_ != exists;
    run->exists_ = exists;
  }
  if (!has_changed) return;
  name_runs();
  ++version_;
}

void RunCatalog::look_for_changes() {
  std::vector<std::shared_ptr<Run>> runs;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [folder, run] : runs_) runs.push_back(run);
  }
  const double now = unix_time();
  for (const auto& run : runs) {
    if (is_stopping_) return;
    auto files = run->read_files(now);
    if (files.has_changed) ++version_;
    if (files.metrics_stamp == run->metrics_stamp_ && run->is_read_) continue;
    if (run->is_queued_.exchange(true)) continue;
    run->metrics_stamp_ = std::move(files.metrics_stamp);
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(run);
    }
    changed_.notify_all();
  }
}

void RunCatalog::watch() {
  for (int round = 0; !is_stopping_; ++round) {
    if (round % kFolderInterval == kFolderInterval - 1) look_for_runs();
    look_for_changes();
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kInterval, [&] { return is_stopping_.load(); });
  }
}

void RunCatalog::publish(Run& run) {
  ++run.version_;
  ++version_;
}

void RunCatalog::read_metrics() {
  while (true) {
    std::shared_ptr<Run> run;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return is_stopping_ || !queue_.empty(); });
      if (is_stopping_) return;
      run = std::move(queue_.front());
      queue_.pop_front();
    }
    bool is_first_piece = true;
    const bool has_changed = run->metrics_.read_more([&] {
      if (!std::exchange(is_first_piece, false))
        publish(*run);  // the page shows the part of a large file that has been read
      return !is_stopping_;
    });
    const bool was_read = run->is_read_.exchange(true);
    if (has_changed || !was_read) publish(*run);
    run->is_queued_ = false;  // a change in the meantime has another stamp, so the run is queued again
  }
}

}  // namespace lockstep::ui
