// Overview.
//
// A TrainingRun combines a CheckpointDirectory, a MetricLog, a Progress and a PreemptionGuard; each can be used without
// it. What it adds is the position: the number of epochs and steps, the loop of the epoch and the batch in the loop.
//
// Ranks must agree on when to stop and when to save, though signals arrive at different times and clocks differ. They
// agree in exchange(): one small all-reduce that a step makes when it is due. Rank 0 measures the steps and proposes
// after how many the next exchange is due, so that there are a few in a second, whether steps take 0.1 ms or a minute.

#include <lockstep/training_run.h>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iomanip>

#include <ATen/ATen.h>
#include <torch/optim/optimizer.h>

#include <lockstep/error.h>
#include <lockstep/preemption_guard.h>
#include <lockstep/print.h>

#include "base/live_folder.h"
#include "base/owner_process.h"
#include "base/text.h"
#include "checkpoint/agree.h"
#include "report/live_status.h"
#include "report/metric_files.h"
#include "report/metric_sums.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::duration<double> kBetweenExchanges{0.2};
constexpr int64_t kMostSteps = 100'000;  // between exchanges
constexpr const char* kSummaryFile = "/summary.json";
constexpr const char* kSettingsFile = "/settings.json";

CheckpointDirectoryOptions checkpoint_options(const TrainingRunOptions& options) {
  return {.keep_last = options.keep_last,
          .best = options.best,
          .better = options.better,
          .asynchronous = options.asynchronous,
          .sharded = options.sharded};
}

std::string describe(const std::map<std::string, double>& metrics) {
  std::string result;
  for (const auto& [name, value] : metrics) result += text("  ", name, " ", std::setprecision(4), value);
  return result;
}

}  // namespace

class TrainingRun::Impl {
 public:
  Impl(ProcessGroup group, std::string folder, TrainingState state, TrainingRunOptions options);

  bool next_epoch(int64_t epochs);
  void begin_step();
  void end_step();
  void abandon_step();
  template <class Number>
  void record(std::string_view name, const Number& value, const MetricOptions& options);
  std::optional<int64_t> begin_loop(Loop loop);
  void begin_wait();
  void end_wait();
  void took_batch(int64_t samples, std::chrono::nanoseconds waited);
  void end_loop();
  bool save(const std::map<std::string, double>& metrics);

  // For StateTraits: the entry "run" of checkpoints.
  Value state_dict() const;
  void load_state_dict(const Value& state);

  // Constant after construction.
  const ProcessGroup group_;
  const std::string folder_;
  const TrainingRunOptions options_;

  CheckpointDirectory checkpoints_;
  MetricLog metrics_;
  Progress progress_;
  std::optional<PreemptionGuard> guard_{};
  std::optional<EarlyStopping> early_stopping_{};
  TrainingState state_;

  bool is_resumed_ = false;
  bool is_stopping_ = false;
  bool in_step_ = false;
  bool has_failed_ = false;  // the last step: it may be repeated with the same batches
  int64_t batches_in_step_ = 0, samples_in_step_ = 0;
  std::map<std::string, double> results_{};

 private:
  /// What the ranks tell each other.
  struct Exchanged {
    bool stops = false;
    bool saves = false;
  };

  void show_position();
  bool shows() const { return options_.progress.output != ProgressOptions::Output::kOff; }
  void end_epoch(int64_t epochs);
  void finish(int64_t epochs);
  void stop();
  Exchanged exchange(bool is_save_due);
  void show_metrics();
  double epochs_completed() const;
  double seconds_in_loops() const;
  bool is_time_to_save() const;

  // The position.
  bool in_epoch_ = false;
  bool is_finished_ = false;
  bool is_in_loop_ = false;
  int64_t loop_ = 0;           // the number of the current or the next loop of the epoch
  int64_t batches_ = 0;        // taken in the loop
  int64_t batches_known_ = 0;  // in a whole loop; 0 if unknown
  std::function<Value()> save_position_{};
  /// Where the interrupted epoch continues.
  struct Resumed {
    int64_t loop = 0;
    int64_t batches = 0;
    Value position{};
  };
  std::optional<Resumed> resumed_{};

  // The next exchange.
  int64_t steps_until_exchange_ = 1;
  int64_t steps_since_exchange_ = 0;
  int64_t samples_since_exchange_ = 0;
  Clock::time_point last_exchange_ = Clock::now();
  Clock::time_point last_save_ = Clock::now();

  // Of the whole run, for the summary.
  int64_t samples_ = 0;          // of all ranks
  double seconds_in_loops_ = 0;  // without evaluations
  Clock::time_point loop_began_{};

  // What rank 0 shows.
  std::string title_{};
  bool has_bar_ = false;
  Clock::time_point epoch_began_{};
  std::vector<std::string> shown_{};  // means, in the order of their first value
  std::map<std::string, detail::Smoothed, std::less<>> smoothed_{};
  std::map<std::string, double> shown_record_{};

  OwnedPointer<detail::LiveStatus> live_{};  // null without options_.live; last, so that it is destroyed first
};

TrainingRun::Impl::Impl(ProcessGroup group, std::string folder, TrainingState state, TrainingRunOptions options)
    : group_(std::move(group)),
      folder_(std::move(folder)),
      options_(std::move(options)),
      checkpoints_(group_, folder_ + "/checkpoints", checkpoint_options(options_)),
      metrics_(group_, folder_, options_.metrics),
      progress_(group_, options_.progress),
      state_(std::move(state)) {
  if (options_.early_stopping) early_stopping_.emplace(*options_.early_stopping);
  const auto& parts = state_.parts();
  if (std::none_of(parts.begin(), parts.end(), [](const auto& part) { return part.name == "rng"; })) state_.add_rng();
  state_.add("run", *this);
  if (!options_.resume)
    detail::run_and_agree(group_, [&] {
      if (group_.rank() == 0 && !checkpoints_.numbers().empty())
        throw UsageError(0, text("TrainingRun: ", folder_,
                                 " has checkpoints of an earlier run; use another folder, remove this one, or set "
                                 "resume to continue the run"));
    });
  if (options_.live)
    live_ = make_unique_owned<detail::LiveStatus>(group_, folder_);
  else if (group_.rank() == 0)
    remove_stale_live_files(live_folder(folder_), {});
  if (options_.resume) is_resumed_ = checkpoints_.resume(state_) > 0;
  if (group_.rank() == 0) detail::write_settings(folder_ + kSettingsFile, options_.settings);
  show_position();
  if (!options_.signals.empty()) guard_.emplace(group_, PreemptionGuardOptions{.signals = options_.signals});
  if (is_resumed_ && shows())
    print(group_, "Resuming ", folder_, " in epoch ", metrics_.epochs() + 1, ", after step ", metrics_.steps());
}

// --- epochs

bool TrainingRun::Impl::next_epoch(int64_t epochs) {
  if (in_step_) throw UsageError(group_.rank(), "TrainingRun: next_epoch() is called inside of step()");
  if (is_finished_) return false;
  if (in_epoch_) end_epoch(epochs);
  const bool is_over = early_stopping_ && early_stopping_->should_stop();
  if (is_stopping_ || is_over || metrics_.epochs() >= epochs) {
    finish(epochs);
    return false;
  }
  if (group_.rank() == 0) ::unlink((folder_ + kSummaryFile).c_str());  // of a run that is continued with more epochs
  in_epoch_ = true;
  is_in_loop_ = false;
  loop_ = batches_ = batches_known_ = 0;
  save_position_ = nullptr;
  epoch_began_ = Clock::now();
  title_ = text("epoch ", metrics_.epochs() + 1, "/", epochs);
  if (live_) live_->position().epochs = epochs;
  show_position();
  return true;
}

void TrainingRun::Impl::end_epoch(int64_t epochs) {
  if (is_stopping_) return;  // saved inside of the epoch
  if (is_in_loop_) end_loop();
  in_epoch_ = false;
  resumed_.reset();
  results_ = metrics_.end_epoch();
  if (early_stopping_) {
    const auto& metric = options_.early_stopping->metric;
    const auto found = results_.find(metric);
    if (found == results_.end())
      throw UsageError(group_.rank(), text("TrainingRun: early_stopping watches the metric '", metric,
                                           "', which was not logged in this epoch; log it in every epoch"));
    early_stopping_->update(found->second);
  }
  const std::chrono::duration<double> took = Clock::now() - epoch_began_;
  progress_.end(text(title_, describe(results_), "  ", std::fixed, std::setprecision(1), took.count(), " s"));
  has_bar_ = false;

  const auto agreed = exchange(false);
  const bool is_last = metrics_.epochs() >= epochs || (early_stopping_ && early_stopping_->should_stop());
  const bool is_due = options_.save_every_epochs > 0 && metrics_.epochs() % options_.save_every_epochs == 0;
  if (agreed.stops || is_last || is_due) save(results_);
  if (agreed.stops && !is_last) stop();
}

void TrainingRun::Impl::finish(int64_t epochs) {
  is_finished_ = true;
  progress_.end();
  metrics_.wait();
  checkpoints_.wait();
  show_position();
  if (live_)
    live_->set_state(is_stopping_ ? detail::LiveStatus::State::kStopped : detail::LiveStatus::State::kFinished);
  if (group_.rank() != 0 || is_stopping_) return;
  detail::write_summary(folder_ + kSummaryFile, {.is_complete = metrics_.epochs() >= epochs,
                                                 .epochs = metrics_.epochs(),
                                                 .steps = metrics_.steps(),
                                                 .world_size = group_.size(),
                                                 .samples = samples_,
                                                 .seconds = seconds_in_loops_,
                                                 .metrics = results_});
}

// --- loops

std::optional<int64_t> TrainingRun::Impl::begin_loop(Loop loop) {
  if (!in_epoch_)
    throw UsageError(group_.rank(), "TrainingRun: batches() is used outside of an epoch; call next_epoch() first");
  if (is_in_loop_) end_loop();  // it was left early
  is_in_loop_ = true;
  batches_known_ = loop.batches;
  save_position_ = std::move(loop.save);
  loop_began_ = Clock::now();
  int64_t skipped = 0;
  if (resumed_) {
    bool is_complete = loop_ < resumed_->loop;
    if (!is_complete) {
      const auto [number, batches, position] = *std::exchange(resumed_, std::nullopt);
      batches_ = batches;
      if (loop.load && !position.is_none())
        is_complete = !loop.load(position);
      else
        skipped = batches;
    }
    if (is_complete) {
      end_loop();
      return std::nullopt;
    }
  }
  progress_.begin(title_, batches_known_, batches_);
  has_bar_ = true;
  show_position();
  return skipped;
}

void TrainingRun::Impl::begin_wait() {
  if (live_ && live_->activity().is_training_thread()) live_->activity().enter(detail::Activity::Phase::kData);
}

void TrainingRun::Impl::end_wait() {
  if (live_ && live_->activity().is_training_thread()) live_->activity().enter(detail::Activity::Phase::kOther);
}

void TrainingRun::Impl::took_batch(int64_t samples, std::chrono::nanoseconds waited) {
  if (std::exchange(has_failed_, false)) batches_in_step_ = samples_in_step_ = 0;  // its batches were given up
  ++batches_;
  ++batches_in_step_;
  samples_in_step_ += samples;
  progress_.add_waiting(waited);
  if (!live_) return;
  auto& position = live_->position();
  position.batch.store(batches_, std::memory_order_relaxed);
  position.samples.store(position.samples.load(std::memory_order_relaxed) + samples, std::memory_order_relaxed);
}

void TrainingRun::Impl::end_loop() {
  is_in_loop_ = false;
  ++loop_;
  batches_ = 0;
  save_position_ = nullptr;
  seconds_in_loops_ += std::chrono::duration<double>(Clock::now() - loop_began_).count();
}

double TrainingRun::Impl::seconds_in_loops() const {
  return seconds_in_loops_ + (is_in_loop_ ? std::chrono::duration<double>(Clock::now() - loop_began_).count() : 0);
}

/// For the live file. Not in every step: end_step() and took_batch() store what changes there.
void TrainingRun::Impl::show_position() {
  if (!live_) return;
  auto& position = live_->position();
  position.step = metrics_.steps();
  position.epoch = epochs_completed();
  position.batch = batches_;
  position.batches = batches_known_;
}

/// With the fraction of the epoch's first loop.
double TrainingRun::Impl::epochs_completed() const {
  double fraction = 0;
  if (in_epoch_ && loop_ > 0)
    fraction = 1;
  else if (in_epoch_ && batches_known_ > 0)
    fraction = std::min(1.0, static_cast<double>(batches_) / static_cast<double>(batches_known_));
  return static_cast<double>(metrics_.epochs()) + fraction;
}

// --- steps

void TrainingRun::Impl::begin_step() {
  if (in_step_) throw UsageError(group_.rank(), "TrainingRun: step() is called inside of step()");
  if (!in_epoch_)
    throw UsageError(group_.rank(), "TrainingRun: step() is called outside of an epoch; call next_epoch() first");
  in_step_ = true;
  if (live_) live_->activity().begin_step();
}

void TrainingRun::Impl::abandon_step() {
  in_step_ = false;
  has_failed_ = true;
  metrics_.abandon_step();
}

template <class Number>
void TrainingRun::Impl::record(std::string_view name, const Number& value, const MetricOptions& options) {
  if (is_stopping_) return;  // the epoch is not complete
  if (!in_step_) return metrics_.log_epoch(name, value, options);
  metrics_.log(name, value, options);
  if (options.reduce == Reduce::kMean && std::find(shown_.begin(), shown_.end(), name) == shown_.end())
    shown_.emplace_back(name);
}

void TrainingRun::Impl::end_step() {
  if (options_.optimizer && group_.rank() == 0)
    metrics_.log("lr", options_.optimizer->param_groups().at(0).options().get_lr(),
                 {.reduce = Reduce::kLast, .steps_only = true});
  const double epoch = epochs_completed();
  metrics_.end_step(epoch);
  in_step_ = has_failed_ = false;
  if (live_) {
    live_->position().step.store(metrics_.steps(), std::memory_order_relaxed);
    live_->position().epoch.store(epoch, std::memory_order_relaxed);
  }
  samples_since_exchange_ += std::exchange(samples_in_step_, 0);
  if (!std::exchange(has_bar_, true)) progress_.begin(title_);  // steps without batches()
  progress_.advance(std::max<int64_t>(std::exchange(batches_in_step_, 0), 1));
  const bool is_save_due = options_.save_every_steps > 0 && metrics_.steps() % options_.save_every_steps == 0;
  if (++steps_since_exchange_ < steps_until_exchange_ && !is_save_due) return;
  const auto agreed = exchange(is_time_to_save());
  metrics_.flush();
  show_metrics();
  if (is_save_due || agreed.saves || agreed.stops) save({});
  if (agreed.stops) stop();
}

bool TrainingRun::Impl::is_time_to_save() const {
  return options_.save_every.count() > 0 && Clock::now() - last_save_ >= options_.save_every;
}

/// Collective.
TrainingRun::Impl::Exchanged TrainingRun::Impl::exchange(bool is_save_due) {
  const bool is_first = group_.rank() == 0;
  int64_t proposed = 0;
  if (is_first) {
    const double between = std::max(1e-9, std::chrono::duration<double>(Clock::now() - last_exchange_).count());
    const double fitting =
        static_cast<double>(std::max<int64_t>(steps_since_exchange_, 1)) * (kBetweenExchanges.count() / between);
    const auto most = std::min(kMostSteps, 2 * steps_until_exchange_);  // the first steps are slow
    proposed = std::clamp(static_cast<int64_t>(std::min(fitting, 1e9)), int64_t{1}, most);
  }
  const bool is_signalled = guard_ && PreemptionGuard::was_signalled();
  const std::array<int64_t, 4> mine{is_signalled, is_first && is_save_due, samples_since_exchange_, proposed};
  const auto device = group_.supports(c10::kCPU) ? c10::Device(c10::kCPU) : group_.device();
  const auto sums = at::tensor(c10::ArrayRef<int64_t>(mine), at::kLong).to(device);
  group_.all_reduce(sums);
  const auto all = sums.cpu();
  const auto* sum = all.data_ptr<int64_t>();
  samples_ += sum[2];
  progress_.add_samples(sum[2]);
  steps_until_exchange_ = sum[3];
  steps_since_exchange_ = samples_since_exchange_ = 0;
  last_exchange_ = Clock::now();
  return {.stops = sum[0] > 0, .saves = sum[1] > 0};
}

void TrainingRun::Impl::show_metrics() {
  if (group_.rank() != 0) return;
  auto record = metrics_.latest();
  if (record == shown_record_) return;
  for (const auto& name : shown_)
    if (const auto found = record.find(name); found != record.end())
      progress_.set(name, smoothed_[name].add(found->second));
  if (const auto rate = record.find("lr"); rate != record.end()) progress_.set("lr", rate->second);
  shown_record_ = std::move(record);
}

// --- checkpoints

bool TrainingRun::Impl::save(const std::map<std::string, double>& metrics) {
  last_save_ = Clock::now();
  return checkpoints_.save(metrics_.steps(), state_, metrics);
}

void TrainingRun::Impl::stop() {
  is_stopping_ = true;
  progress_.end();
  checkpoints_.wait();
  if (shows()) print(group_, "Stopped after step ", metrics_.steps(), "; start the program again to continue");
}

Value TrainingRun::Impl::state_dict() const {
  auto results = Value::dict();
  for (const auto& [name, value] : results_) results.set(name, value);
  return Value::dict({{"in_epoch", in_epoch_},
                      {"loop", loop_},
                      {"batches", batches_},
                      {"position", save_position_ ? save_position_() : Value()},
                      {"results", std::move(results)},
                      {"samples", samples_},
                      {"seconds_in_loops", seconds_in_loops()},
                      {"early_stopping", early_stopping_ ? early_stopping_->state_dict() : Value()},
                      {"metrics", metrics_.state_dict()}});
}

void TrainingRun::Impl::load_state_dict(const Value& state) {
  metrics_.load_state_dict(state.at("metrics"));
  if (const auto& stopping = state.at("early_stopping"); early_stopping_ && !stopping.is_none())
    early_stopping_->load_state_dict(stopping);
  results_.clear();
  for (const auto& [name, value] : state.at("results").items()) results_[name.as_string()] = value.as_double();
  samples_ = state.at("samples").as_int();
  seconds_in_loops_ = state.at("seconds_in_loops").as_double();
  resumed_.reset();
  if (state.at("in_epoch").as_bool())
    resumed_ = {
        .loop = state.at("loop").as_int(), .batches = state.at("batches").as_int(), .position = state.at("position")};
}

// --- public

TrainingRun::TrainingRun(ProcessGroup group, std::string folder, TrainingState state, TrainingRunOptions options)
    : impl_(std::make_unique<Impl>(std::move(group), std::move(folder), std::move(state), std::move(options))) {}
TrainingRun::~TrainingRun() = default;

bool TrainingRun::next_epoch(int64_t epochs) {
  return impl_->next_epoch(epochs);
}
bool TrainingRun::save() {
  return impl_->save({});
}
int64_t TrainingRun::epoch() const {
  return impl_->metrics_.epochs();
}
int64_t TrainingRun::steps() const {
  return impl_->metrics_.steps();
}
bool TrainingRun::is_resumed() const {
  return impl_->is_resumed_;
}
bool TrainingRun::is_stopping() const {
  return impl_->is_stopping_;
}
int TrainingRun::exit_code() const {
  return impl_->is_stopping_ ? PreemptionGuard::kExitCode : 0;
}
const std::map<std::string, double>& TrainingRun::results() const {
  return impl_->results_;
}
const std::string& TrainingRun::folder() const {
  return impl_->folder_;
}
CheckpointDirectory& TrainingRun::checkpoints() {
  return impl_->checkpoints_;
}
TensorBoardWriter* TrainingRun::tensorboard() {
  return impl_->metrics_.tensorboard();
}
void TrainingRun::begin_step() {
  impl_->begin_step();
}
void TrainingRun::end_step() {
  impl_->end_step();
}
void TrainingRun::abandon_step() {
  impl_->abandon_step();
}
void TrainingRun::record(std::string_view name, double value, const MetricOptions& options) {
  impl_->record(name, value, options);
}
void TrainingRun::record(std::string_view name, const at::Tensor& value, const MetricOptions& options) {
  impl_->record(name, value, options);
}
double TrainingRun::default_weight() const {
  return impl_->in_step_ && impl_->batches_in_step_ > 0 ? static_cast<double>(impl_->samples_in_step_) : 1;
}
std::optional<int64_t> TrainingRun::begin_loop(Loop loop) {
  return impl_->begin_loop(std::move(loop));
}
void TrainingRun::begin_wait() {
  impl_->begin_wait();
}
void TrainingRun::end_wait() {
  impl_->end_wait();
}
void TrainingRun::took_batch(int64_t samples, std::chrono::nanoseconds waited) {
  impl_->took_batch(samples, waited);
}
void TrainingRun::end_loop() {
  impl_->end_loop();
}

}  // namespace lockstep
