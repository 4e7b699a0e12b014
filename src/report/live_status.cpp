#include "report/live_status.h"

#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <fstream>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/live_folder.h"
#include "base/log.h"
#include "base/start_thread.h"
#include "base/text.h"
#include "base/variables.h"
#include "checkpoint/files.h"
#include "comm/group/group.h"
#include "comm/watch/flight_recorder.h"

namespace lockstep::detail {
namespace {

using LiveJson = nlohmann::ordered_json;
using Phase = Activity::Phase;

constexpr auto kBetweenWrites = std::chrono::seconds(1);
constexpr auto kInterval = std::chrono::seconds(5);        // of rates and shares
constexpr auto kBlocked = std::chrono::milliseconds(500);  // a call that blocks longer is shown
constexpr auto kMaxWait = std::chrono::seconds(1);         // of a failing call, for the file
constexpr size_t kMaxSnapshots = 600;
constexpr size_t kShownCalls = 20;

const char* to_text(LiveStatus::State state) {
  switch (state) {
    case LiveStatus::State::kRunning:
      return "running";
    case LiveStatus::State::kFinished:
      return "finished";
    case LiveStatus::State::kStopped:
      return "stopped";
    case LiveStatus::State::kFailed:
      return "failed";
  }
  return "";
}

double rounded_to(double value, double digits) {
  return std::round(value * digits) / digits;
}

int64_t resident_memory() {
  int64_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

std::string absolute_path(const std::string& path) {
  const std::unique_ptr<char, decltype(&::free)> resolved(::realpath(path.c_str(), nullptr), &::free);
  return resolved ? resolved.get() : path;
}

/// Writes the folder of the run to the file that the launcher of this rank reads.
void note_folder(const std::string& run_folder) {
  const auto note = process_variable(kRunNoteVariable);
  if (!note || note->empty()) return;
  const auto name = note->substr(note->rfind('/') + 1);
  const auto failure = replace_live_file(folder_of(*note), name, absolute_path(run_folder));
  if (!failure.empty()) log_debug(text(failure, "; the launcher writes no live files"));
}

/// The shares of the interval. Parts that were not measured so far are null: their time is in "other".
LiveJson shares(const Activity::Times& from, const Activity::Times& to, double seconds) {
  LiveJson json = LiveJson::object();
  double rest = 1;
  const auto add = [&](const char* name, Phase phase, bool is_known) {
    const double share = std::clamp(static_cast<double>(to[phase] - from[phase]) / 1e9 / seconds, 0.0, 1.0);
    rest -= share;
    json[name] = is_known && seconds > 0 ? LiveJson(rounded_to(share, 1e4)) : LiveJson();
  };
  add("forward", Phase::kForward, to[Phase::kForward] > 0);
  add("backward", Phase::kBackward, to[Phase::kBackward] > 0);
  add("communication", Phase::kCommunication, true);
  add("data", Phase::kData, to[Phase::kData] > 0);
  json["other"] = seconds > 0 ? LiveJson(rounded_to(std::max(0.0, rest), 1e4)) : LiveJson();
  return json;
}

/// The call in which the training thread blocks. On a GPU, where the host only queues calls, the oldest call that the
/// device has not finished.
LiveJson blocking_call(const FlightRecorder& recorder, const Activity::Times& times, bool is_gpu) {
  const bool is_blocked = times.phase == Phase::kCommunication && times.in_phase >= kBlocked;
  if (!is_blocked && !is_gpu) return {};
  const auto record = recorder.running(is_blocked ? FlightRecorder::Which::kNewest : FlightRecorder::Which::kOldest);
  if (!record) return {};
  auto waited = std::chrono::steady_clock::now() - record->started;
  if (is_blocked) waited = std::min<std::chrono::steady_clock::duration>(waited, times.in_phase);
  if (waited < kBlocked) return {};
  return {{"operation", name_of(record->call.operation)},
          {"group", record->group},
          {"number", record->call_id.number},
          {"seconds", rounded_to(std::chrono::duration<double>(waited).count(), 1e2)},
          {"where", describe(record->site)}};
}

LiveJson failure_to_json(const std::exception_ptr& cause, const FlightRecorder& recorder) {
  LiveJson json{{"kind", cause ? name_of(kind_of(cause)) : "exception"},
                {"message", cause ? message_of(cause)
                                  : "an exception has ended the run on this rank; the output of the rank has its text"},
                {"flight_recorder", recorder.file()},
                {"calls", LiveJson::array()}};
  const auto records = recorder.records();
  const auto now = std::chrono::steady_clock::now();
  for (size_t i = records.size() - std::min(records.size(), kShownCalls); i < records.size(); ++i)
    if (auto call = LiveJson::parse(to_json(records[i], now), nullptr, /*allow_exceptions=*/false); call.is_object())
      json["calls"].push_back(std::move(call));
  return json;
}

LiveJson gpu_to_json(const GpuMonitor* gpu) {
  const auto status = gpu ? gpu->read() : std::nullopt;
  if (!status) return {};
  return {{"name", status->name},
          {"utilization", status->utilization},
          {"memory_used_bytes", status->memory_used_bytes},
          {"memory_total_bytes", status->memory_total_bytes}};
}

}  // namespace

LiveStatus::LiveStatus(const ProcessGroup& group, const std::string& run_folder)
    : group_(group),
      activity_(group_of(group)->activity()),
      recorder_(group_of(group)->recorder()),
      folder_(live_folder(run_folder)),
      name_(live_rank_file(group.rank())),
      attempt_(this_attempt()),
      started_(unix_time()),
      exceptions_(std::uncaught_exceptions()),
      gpu_(GpuMonitor::open(group.device())) {
  if (group_.rank() == 0) {
    const bool is_launched = process_variable(kRunNoteVariable).has_value();  // the launcher removes its own files
    const int others = is_launched ? INT_MAX : 0;
    remove_stale_live_files(folder_, {.ranks = group_.size(), .outputs = others, .nodes = others});
  }
  if (group_.local_rank() == 0) note_folder(run_folder);
  activity_->start();
  history_.push_back(take_snapshot());
  activity_->set_failure_hook([this] { on_group_failure(); });
  thread_ = start_thread("the live status of a training run", [this] { run(); });
}

LiveStatus::~LiveStatus() {
  activity_->set_failure_hook(nullptr);
  const bool has_failed = std::uncaught_exceptions() > exceptions_ || group_failure();
  auto running = State::kRunning;
  state_.compare_exchange_strong(running, has_failed ? State::kFailed : State::kStopped);
  {
    std::lock_guard lock(mutex_);
    is_ending_ = true;
    changed_.notify_all();
  }
  thread_.join();
  activity_->stop();
}

void LiveStatus::set_state(State state) {
  state_ = state;
  std::lock_guard lock(mutex_);
  ++requested_;
  changed_.notify_all();
}

void LiveStatus::fail(const std::exception_ptr& error) {
  {
    std::lock_guard lock(mutex_);
    error_ = error;
  }
  write_failure();
}

void LiveStatus::on_group_failure() {
  if (state_ == State::kRunning && group_failure()) write_failure();
}

// A process often ends soon after a call has failed, so this function waits for the file.
void LiveStatus::write_failure() {
  state_ = State::kFailed;
  std::unique_lock lock(mutex_);
  const auto request = ++requested_;
  changed_.notify_all();
  changed_.wait_for(lock, kMaxWait, [&] { return written_ >= request; });
}

void LiveStatus::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    const bool is_last = is_ending_;
    const auto requested = requested_;
    lock.unlock();
    write();
    lock.lock();
    written_ = requested;
    changed_.notify_all();
    if (is_last) return;
    changed_.wait_for(lock, kBetweenWrites, [&] { return is_ending_ || requested_ != written_; });
  }
}

void LiveStatus::write() {
  std::string failure;
  try {
    const auto content = to_json(take_snapshot());
    failure = make_live_folder(folder_);
    if (failure.empty()) failure = replace_live_file(folder_, name_, content);
  } catch (const std::exception& error) {  // memory ran out
    failure = error.what();
  }
  if (failure.empty() || std::exchange(has_warned_, true)) return;
  log_warning_async(text(failure, "; the training continues without the live status of this rank"));
}

/// The group for the CPU fails on its own first.
std::exception_ptr LiveStatus::group_failure() const {
  const auto& group = group_of(group_);
  if (auto cause = group->failure()) return cause;
  return group->cpu_group() ? group->cpu_group()->failure() : nullptr;
}

std::exception_ptr LiveStatus::failure() {
  if (auto cause = group_failure()) return cause;
  std::lock_guard lock(mutex_);
  return error_;
}

LiveStatus::Snapshot LiveStatus::take_snapshot() const {
  return {Clock::now(), position_.step, position_.samples, activity_->times()};
}

// The interval grows until it contains a step.
LiveStatus::Snapshot LiveStatus::begin_of_interval(const Snapshot& now) {
  while (history_.size() > 1 && now.at - history_[1].at >= kInterval && now.step > history_[1].step)
    history_.pop_front();
  if (history_.size() >= kMaxSnapshots) history_.pop_front();
  const auto begin = history_.front();
  if (now.at - history_.back().at > kBetweenWrites / 2) history_.push_back(now);
  return begin;
}

std::string LiveStatus::to_json(const Snapshot& now) {
  const auto begin = begin_of_interval(now);
  const double seconds = std::chrono::duration<double>(now.at - begin.at).count();
  const bool has_steps = now.step > begin.step && seconds > 0;
  const auto rate = [&](int64_t count) {
    return has_steps ? LiveJson(rounded_to(static_cast<double>(count) / seconds, 1e6)) : LiveJson();
  };
  const auto cause = failure();
  auto state = state_.load();
  if (state == State::kRunning && cause) state = State::kFailed;
  const auto& process = group_of(group_)->membership().peers.at(static_cast<size_t>(group_.rank())).process;
  LiveJson json{{"format", kLiveFormat},
                {"job", attempt_.job},
                {"attempt", attempt_.restarts},
                {"rank", group_.rank()},
                {"world_size", group_.size()},
                {"local_rank", group_.local_rank()},
                {"host", process.host},
                {"pid", process.pid},
                {"device", group_.device().str()},
                {"started", rounded_to(started_, 1e3)},
                {"updated", rounded_to(unix_time(), 1e3)},
                {"state", to_text(state)},
                {"step", now.step},
                {"epoch", rounded_to(position_.epoch, 1e6)},
                {"epochs", position_.epochs.load()},
                {"batch", position_.batch.load()},
                {"batches", position_.batches.load()},
                {"steps_per_second", rate(now.step - begin.step)},
                {"samples_per_second", rate(now.samples - begin.samples)},
                {"time", shares(begin.times, now.times, seconds)}};
  const bool is_running = state == State::kRunning;
  json["call"] = is_running ? blocking_call(*recorder_, now.times, group_.device().is_cuda()) : LiveJson();
  json["memory"] = {{"resident_bytes", resident_memory()}};
  json["gpu"] = gpu_to_json(gpu_.get());
  json["failure"] = state == State::kFailed ? failure_to_json(cause, *recorder_) : LiveJson();
  return json.dump(-1, ' ', false, LiveJson::error_handler_t::replace) + '\n';
}

}  // namespace lockstep::detail
