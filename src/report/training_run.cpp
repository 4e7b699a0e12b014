// Overview.
//
// A TrainingRun combines a CheckpointDirectory, a MetricLog, a Progress and a PreemptionGuard; each can be used without
// it. TrainingRun adds the position: the number of epochs and steps, the loop of the epoch and the batch in the loop.
//
// In some of the steps the ranks agree on when to stop and when to save (RunExchange). Only such steps and the ends of
// epochs save, so that a check of all values before the exchange keeps a run with stop_on_nan from saving after NaN.

#include <lockstep/training_run.h>

#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include <torch/optim/optimizer.h>

#include <lockstep/error.h>
#include <lockstep/preemption_guard.h>

#include "base/live_folder.h"
#include "base/log.h"
#include "base/owner_process.h"
#include "base/text.h"
#include "checkpoint/folder.h"
#include "comm/join.h"
#include "comm/run_and_agree.h"
#include "report/live_status.h"
#include "report/metric_files.h"
#include "report/non_finite.h"
#include "report/run_display.h"
#include "report/run_exchange.h"
#include "report/watched_metrics.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kCheckpointFolder = "/checkpoints";
constexpr const char* kSummaryFile = "/summary.json";
constexpr const char* kSettingsFile = "/settings.json";

CheckpointDirectoryOptions checkpoint_options(const TrainingRunOptions& options) {
  return {.keep_last = options.keep_last,
          .best = options.best,
          .best_mode = options.best_mode,
          .asynchronous = options.asynchronous,
          .sharded = options.sharded};
}

/// For calls that all ranks make equally often. Returns the group.
const ProcessGroup& check_run_call(const ProcessGroup& group, const char* call) {
  detail::refuse_in_join(group, call,
                         "give all ranks equally many batches instead (Tail::kPad, StreamEnd::kTogether), set "
                         "throw_on_early_termination, or call join() inside of step()");
  return group;
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
  void check_batches(int64_t batches) const;
  void enter(detail::Activity::Phase phase);
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
  detail::RunDisplay display_;
  std::optional<PreemptionGuard> guard_{};
  detail::WatchedMetrics watched_;
  TrainingState state_;

  bool is_resumed_ = false;
  bool is_stopping_ = false;
  bool in_step_ = false;
  bool has_failed_ = false;  // the last step has failed: it may be repeated with the same batches
  int64_t batches_in_step_ = 0, samples_in_step_ = 0;
  std::map<std::string, double> results_{};

 private:
  void show_position();
  void end_epoch(int64_t epochs);
  void finish(int64_t epochs);
  void stop();
  bool wait_for_checkpoint();
  detail::RunExchange::Agreed exchange(bool is_save_due);
  template <class Kind>
  [[noreturn]] void fail(const Kind& error);
  double epochs_completed() const;
  double seconds_in_loops() const;

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

  detail::RunExchange exchange_;
  int64_t samples_since_exchange_ = 0;
  Clock::time_point last_save_ = Clock::now();
  std::optional<Error> stopped_by_{};  // a value that is NaN or infinite

  // Of the whole run, for the summary.
  int64_t samples_ = 0;          // of all ranks
  double seconds_in_loops_ = 0;  // without evaluations
  Clock::time_point loop_began_{};

  OwnedPointer<detail::LiveStatus> live_{};  // null without options_.live; last, so that it is destroyed first
};

TrainingRun::Impl::Impl(ProcessGroup group, std::string folder, TrainingState state, TrainingRunOptions options)
    : group_(check_run_call(group, "TrainingRun: the constructor")),
      folder_(std::move(folder)),
      options_(std::move(options)),
      checkpoints_(group_, folder_ + kCheckpointFolder, checkpoint_options(options_)),
      metrics_(group_, folder_, options_.metrics),
      display_(group_, options_.progress),
      watched_(options_),
      state_(std::move(state)),
      exchange_(group_) {
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
  if (is_resumed_)
    display_.print_line(
        text("Resuming ", folder_, " in epoch ", metrics_.epochs() + 1, ", after step ", metrics_.steps()));
}

// --- epochs

bool TrainingRun::Impl::next_epoch(int64_t epochs) {
  check_run_call(group_, "TrainingRun: next_epoch()");
  if (in_step_) throw UsageError(group_.rank(), "TrainingRun: next_epoch() is called inside of step()");
  if (stopped_by_) throw *stopped_by_;
  if (is_finished_) return false;
  if (in_epoch_) end_epoch(epochs);
  if (is_stopping_ || watched_.should_stop() || metrics_.epochs() >= epochs) {
    finish(epochs);
    return false;
  }
  if (group_.rank() == 0) ::unlink((folder_ + kSummaryFile).c_str());  // of a run that is continued with more epochs
  in_epoch_ = true;
  is_in_loop_ = false;
  loop_ = batches_ = batches_known_ = 0;
  save_position_ = nullptr;
  display_.begin_epoch(metrics_.epochs() + 1, epochs);
  if (live_) live_->position().epochs = epochs;
  show_position();
  return true;
}

void TrainingRun::Impl::end_epoch(int64_t epochs) {
  if (is_stopping_) return;  // saved inside of the epoch
  if (is_in_loop_) end_loop();
  in_epoch_ = false;
  resumed_.reset();
  const auto agreed = exchange(false);
  results_ = metrics_.end_epoch();
  const bool is_due = options_.save_every_epochs > 0 && metrics_.epochs() % options_.save_every_epochs == 0;
  const auto refusal = watched_.update(results_, metrics_.epochs(), is_due || metrics_.epochs() >= epochs);
  display_.end_epoch(results_);

  const bool is_last = metrics_.epochs() >= epochs || watched_.should_stop();
  if (agreed.stops || is_last || is_due || !refusal.empty()) save(results_);
  if (!refusal.empty())
    fail(UsageError(group_.rank(), text("TrainingRun: ", refusal,
                                        ". Then start again in the same folder: the run continues after this epoch")));
  if (agreed.stops && !is_last) stop();
}

void TrainingRun::Impl::finish(int64_t epochs) {
  is_finished_ = true;
  display_.end();
  metrics_.wait();
  if (!is_stopping_) wait_for_checkpoint();
  show_position();
  if (!checkpoints_.last_error().empty()) return;
  if (live_)
    live_->set_state(is_stopping_ ? detail::LiveStatus::State::kStopped : detail::LiveStatus::State::kFinished);
  if (group_.rank() != 0 || is_stopping_) return;
  watched_.warn_without_best(folder_, text(folder_, kCheckpointFolder, '/', detail::kBestFile));
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
  if (is_in_loop_) end_loop();  // the program has left the loop early
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
  display_.begin_loop(batches_known_, batches_);
  show_position();
  return skipped;
}

void TrainingRun::Impl::check_batches(int64_t batches) const {
  if (group_.size() == 1 || detail::is_in_join()) return;  // in a join the numbers may differ
  const auto all = group_.all_gather_object(batches);
  std::string numbers;
  bool is_equal = true;
  for (const auto& number : all) {
    is_equal = is_equal && number.toInt() == batches;
    numbers += text(numbers.empty() ? "" : ", ", number.toInt());
  }
  if (is_equal) return;
  throw UsageError(
      group_.rank(),
      text("TrainingRun: batches(): the ranks have different numbers of batches in this epoch: ", numbers,
           " (by rank); all ranks take the same number of steps. Use Tail::kPad or Tail::kDrop instead of Tail::kExact "
           "in the sampler, give all ranks equally many samples, or train in join() without a TrainingRun"));
}

void TrainingRun::Impl::enter(detail::Activity::Phase phase) {
  if (live_ && live_->activity().is_training_thread()) live_->activity().enter(phase);
}

void TrainingRun::Impl::took_batch(int64_t samples, std::chrono::nanoseconds waited) {
  if (std::exchange(has_failed_, false))
    batches_in_step_ = samples_in_step_ = 0;  // the batches of the failed step do not count
  ++batches_;
  ++batches_in_step_;
  samples_in_step_ += samples;
  display_.add_waiting(waited);
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

/// For the live file. Not called in every step: end_step() and took_batch() store the values that change in a step.
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
  check_run_call(group_, "TrainingRun: step()");
  if (stopped_by_) throw *stopped_by_;
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
  if (options.reduce == MetricReduction::kMean) display_.add_metric(name);
}

void TrainingRun::Impl::end_step() {
  if (options_.optimizer && group_.rank() == 0)
    metrics_.log("lr", options_.optimizer->param_groups().at(0).options().get_lr(),
                 {.reduce = MetricReduction::kLast, .steps_only = true});
  const double epoch = epochs_completed();
  metrics_.end_step(epoch);
  in_step_ = has_failed_ = false;
  if (live_) {
    live_->position().step.store(metrics_.steps(), std::memory_order_relaxed);
    live_->position().epoch.store(epoch, std::memory_order_relaxed);
  }
  samples_since_exchange_ += std::exchange(samples_in_step_, 0);
  display_.end_step(std::exchange(batches_in_step_, 0));
  const bool is_save_due = options_.save_every_steps > 0 && metrics_.steps() % options_.save_every_steps == 0;
  if (!exchange_.count_step() && !is_save_due) return;
  const auto agreed = exchange(options_.save_every.count() > 0 && Clock::now() - last_save_ >= options_.save_every);
  metrics_.flush();
  display_.show(metrics_.latest());
  if (is_save_due || agreed.saves || agreed.stops) save({});
  if (agreed.stops) stop();
}

/// Collective.
detail::RunExchange::Agreed TrainingRun::Impl::exchange(bool is_save_due) {
  const auto agreed = exchange_.run({.is_signalled = guard_ && PreemptionGuard::was_signalled(),
                                     .is_save_due = is_save_due,
                                     .samples = std::exchange(samples_since_exchange_, 0),
                                     .non_finite = options_.stop_on_nan ? metrics_.take_non_finite() : std::nullopt});
  samples_ += agreed.samples;
  display_.add_samples(agreed.samples);
  if (agreed.non_finite.empty()) return agreed;
  stopped_by_.emplace(group_.rank(), text("TrainingRun: NaN or infinite: ", agreed.non_finite,
                                          "; stop_on_nan is set, so all ranks stop, and save no checkpoint; ",
                                          detail::kNonFiniteRemedy, ", and continue from an earlier checkpoint"));
  fail(*stopped_by_);
}

/// Throws an error that all ranks have. Collective.
template <class Kind>
void TrainingRun::Impl::fail(const Kind& error) {
  display_.end();
  checkpoints_.wait();  // an uncaught error ends the process before the writer is done
  if (live_) live_->fail(std::make_exception_ptr(error));
  throw error;
}

// --- checkpoints

bool TrainingRun::Impl::save(const std::map<std::string, double>& metrics) {
  last_save_ = Clock::now();
  return checkpoints_.save(metrics_.steps(), state_, metrics);
}

void TrainingRun::Impl::stop() {
  is_stopping_ = true;
  display_.end();
  if (wait_for_checkpoint())
    display_.print_line(text("Stopped after step ", metrics_.steps(), "; start the program again to continue"));
}

/// Waits until the last checkpoint is on disk. If saving it has failed, logs an error and returns false.
bool TrainingRun::Impl::wait_for_checkpoint() {
  checkpoints_.wait();
  const auto& why = checkpoints_.last_error();
  if (why.empty()) return true;
  const auto message = text("TrainingRun: the last checkpoint, after step ", metrics_.steps(),
                            ", is not on disk: ", why, "; the run is not complete, and started again in ", folder_,
                            " it continues after the checkpoint before, if there is one; exit_code() is 1");
  if (group_.rank() == 0) log_error(message);
  if (live_) live_->fail(std::make_exception_ptr(CheckpointError(group_.rank(), message)));
  return false;
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
                      {"early_stopping", watched_.state_dict()},
                      {"metrics", metrics_.state_dict()}});
}

void TrainingRun::Impl::load_state_dict(const Value& state) {
  metrics_.load_state_dict(state.at("metrics"));
  watched_.load_state_dict(state.at("early_stopping"));
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
  check_run_call(impl_->group_, "TrainingRun: save()");
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
  if (!impl_->checkpoints_.last_error().empty()) return EXIT_FAILURE;
  return impl_->is_stopping_ ? PreemptionGuard::kExitCode : EXIT_SUCCESS;
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
void TrainingRun::check_batches(int64_t batches) const {
  impl_->check_batches(batches);
}
void TrainingRun::begin_wait() {
  impl_->enter(detail::Activity::Phase::kData);
}
void TrainingRun::end_wait() {
  impl_->enter(detail::Activity::Phase::kOther);
}
void TrainingRun::took_batch(int64_t samples, std::chrono::nanoseconds waited) {
  impl_->took_batch(samples, waited);
}
void TrainingRun::end_loop() {
  impl_->end_loop();
}

}  // namespace lockstep
