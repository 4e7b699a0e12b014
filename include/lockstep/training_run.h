#pragma once

#include <signal.h>

#include <chrono>
#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/checkpoint_directory.h>
#include <lockstep/early_stopping.h>
#include <lockstep/export.h>
#include <lockstep/metric_log.h>
#include <lockstep/metric_mode.h>
#include <lockstep/process_group.h>
#include <lockstep/progress.h>
#include <lockstep/training_state.h>

namespace torch::optim {
class Optimizer;
}

namespace lockstep {

/// The value of a setting of a run: a bool, an integer, a floating-point number or a text.
class RunSetting {
 public:
  using Value = std::variant<bool, int64_t, uint64_t, double, std::string>;

  RunSetting(bool value) : value_(value) {}
  template <std::integral Number>
  RunSetting(Number value) {
    if constexpr (std::is_signed_v<Number>)
      value_ = static_cast<int64_t>(value);
    else
      value_ = static_cast<uint64_t>(value);
  }
  template <std::floating_point Number>
  RunSetting(Number value) : value_(static_cast<double>(value)) {}
  RunSetting(std::string value) : value_(std::move(value)) {}
  RunSetting(std::string_view value) : value_(std::string(value)) {}
  RunSetting(const char* value) : value_(std::string(value)) {}

  const Value& value() const { return value_; }

 private:
  Value value_;
};

struct TrainingRunOptions {
  /// Keep the checkpoint with the best value of this metric of the epoch as best.pt. Empty: none. Every epoch after
  /// which save_every_epochs saves, and the last one, must log the metric: next_epoch() throws UsageError otherwise.
  /// NaN is never the best value; if there is no other value, rank 0 warns at the end of the run.
  std::string best{};
  MetricMode best_mode = MetricMode::kMax;
  /// How many of the newest checkpoints to keep. 0: all.
  int keep_last = 3;
  /// Save after every so many epochs, and after the last one. 0: only after the last one.
  int64_t save_every_epochs = 1;
  /// Also save inside epochs: after so many steps, or so much time. 0: not.
  int64_t save_every_steps = 0;
  std::chrono::seconds save_every{0};
  /// As in CheckpointDirectoryOptions.
  bool asynchronous = true;
  bool sharded = false;

  /// Load the newest checkpoint of the folder. Without it, a folder that has checkpoints is refused.
  bool resume = true;
  /// Stop when a metric of the epoch does not improve any more. Every epoch must log the metric: next_epoch() throws
  /// UsageError otherwise.
  std::optional<EarlyStoppingOptions> early_stopping{};
  /// Throw Error on all ranks, in the same step() or next_epoch(), if a rank has logged NaN or infinity. The message
  /// names the metric, the steps and the ranks. Only steps that exchange numbers check, and every step that saves: no
  /// automatic checkpoint is saved after such a value. Such a step waits for values on a GPU. If false, rank 0 logs one
  /// warning for each metric.
  bool stop_on_nan = false;
  /// The signals after which all ranks save and stop; see PreemptionGuard. Empty: none.
  std::vector<int> signals = {SIGTERM, SIGUSR1, SIGINT};

  MetricLogOptions metrics{};
  ProgressOptions progress{};
  /// Its learning rate, of the first parameter group, is shown, and recorded as "lr" in step records. Must outlive the
  /// run.
  const torch::optim::Optimizer* optimizer = nullptr;

  /// Settings that distinguish this run from other runs: {{"lr", 0.05}, {"batch_size", 64}, {"model", "resnet18"}}.
  /// Rank 0 writes them to settings.json.
  std::map<std::string, RunSetting> settings{};
  /// Write live/rank-NNNNN.json, the current state of each rank, about once a second from a separate thread. Must be
  /// the same on all ranks.
  bool live = true;
};

namespace detail {
template <class Range>
class RunBatches;
}

/// A training run in a folder: checkpoints, metrics, progress, preemption and resume. The loops stay yours:
///
///     auto state = lockstep::TrainingState{}.add("model", net).add("optimizer", optimizer);
///     lockstep::TrainingRun run(world, "runs/mnist", state, {.best = "accuracy", .optimizer = &optimizer});
///     while (run.next_epoch(20)) {
///       for (auto& batch : run.batches(loader))
///         run.step([&] {
///           optimizer.zero_grad();
///           auto loss = F::cross_entropy(ddp(batch.data), batch.target);
///           loss.backward();
///           optimizer.step();
///           run.log("loss", loss);
///         });
///       run.log("accuracy", [&] { return evaluate(); });
///     }
///     return run.exit_code();
///
/// Started again with the same folder, the program continues where the last checkpoint was saved: after an epoch, or
/// in the middle of one, with the next batch. With the same number of ranks the result has the same bits as without
/// the interruption. The folder has metrics.jsonl, metrics.csv, TensorBoard's event file and checkpoints/
/// (docs/training_run.md); summary.json is written when the run is complete. settings.json and live/ are for people and
/// programs that watch the run.
///
/// On a signal, Ctrl-C included, all ranks finish the same step, save, and leave their loops: batches() ends, log()
/// with a function does not call it, and next_epoch() returns false.
///
/// Collective: the constructor, next_epoch(), step(), save(). All ranks take the same number of steps in an epoch, so
/// these calls throw UsageError inside of join(), unless throw_on_early_termination is set. A step may hold a whole
/// join(). Now and then, at most every 0.2 s if steps are short, step() exchanges a few numbers between the ranks.
/// Construct it after the objects in the state, which must outlive it. One in a process at a time, except with ranks as
/// threads. Not thread-safe.
class LOCKSTEP_EXPORT TrainingRun {
 public:
  /// Creates the folder and loads the newest intact checkpoint into the state. In addition to the parts of `state`,
  /// checkpoints have the entry "run" and, if it is missing, "rng". Throws as CheckpointDirectory does.
  TrainingRun(ProcessGroup group, std::string folder, TrainingState state, TrainingRunOptions options = {});
  /// Metrics that were not yet written are lost, unless next_epoch() has returned false. Not collective.
  ~TrainingRun();
  TrainingRun(const TrainingRun&) = delete;
  TrainingRun& operator=(const TrainingRun&) = delete;

  /// Ends the current epoch: combines its metrics over the ranks, records them, and saves. Then begins the next epoch,
  /// or the rest of the interrupted epoch. Returns false if `epochs` are complete, after early stopping, and after a
  /// signal; all files are on disk then. If the last checkpoint is not, rank 0 logs an error, there is no summary.json,
  /// and exit_code() is 1.
  bool next_epoch(int64_t epochs);

  /// Returns the batches of a loader, or the elements of another range, for a for loop: those that are left of the
  /// epoch. Calls set_epoch() of a loader's sampler, or of a StreamLoader, and saves and loads its position. Of other
  /// ranges, which must have the same elements after a resume, it skips as many as were used before. An epoch may have
  /// several such loops. Keeps a reference to the range. Of a DataLoader without a sampler, whose position differs
  /// between ranks, it skips batches, too.
  ///
  /// Collective if the range has size(), except in a join: the beginning of the loop throws UsageError on all ranks if
  /// they have different numbers of batches.
  template <class Range>
  detail::RunBatches<Range> batches(Range& range) {
    return {*this, range};
  }

  /// Runs one step and returns its result. The values that `body` logs count when it returns; if it throws, they are
  /// dropped.
  template <class Body>
  std::invoke_result_t<Body&> step(Body&& body);

  /// Records a value: a number, or a tensor with one element, on any device, which is not waited for. In step(), it
  /// counts for the step and the epoch; its weight is the number of samples in the batches of the step, unless given.
  /// Elsewhere it counts for the epoch, with weight 1. Throws as MetricLog::log().
  template <class Number>
  requires(std::convertible_to<const Number&, double> ||
           std::same_as<Number, at::Tensor>) void log(std::string_view name, const Number& value,
                                                      std::optional<double> weight = std::nullopt) {
    record(name, value, {.weight = weight.value_or(default_weight())});
  }
  template <class Number>
  requires(std::convertible_to<const Number&, double> ||
           std::same_as<Number, at::Tensor>) void log(std::string_view name, const Number& value,
                                                      MetricReduction reduce) {
    record(name, value, {.reduce = reduce, .weight = default_weight()});
  }
  /// The same with the result of a function, which is not called if the run is stopping: for an evaluation.
  template <std::invocable Function>
  void log(std::string_view name, const Function& function, std::optional<double> weight = std::nullopt) {
    if (!is_stopping()) log(name, function(), weight);
  }

  /// Saves a checkpoint now. Collective. Returns as CheckpointDirectory::save().
  bool save();

  /// The current epoch, from 0, and the number of steps of the run so far.
  int64_t epoch() const;
  int64_t steps() const;
  /// Whether the constructor has loaded a checkpoint.
  bool is_resumed() const;
  /// Whether a signal has ended the training. Then the code between the end of batches() and next_epoch() should be
  /// short.
  bool is_stopping() const;
  /// What main() should return: 1 if the last checkpoint could not be saved, otherwise PreemptionGuard::kExitCode after
  /// a signal, and 0 if the run has ended without one.
  int exit_code() const;
  /// The metrics of the last epoch that has ended, over all ranks; also of one before a resume.
  const std::map<std::string, double>& results() const;

  const std::string& folder() const;
  CheckpointDirectory& checkpoints();
  /// For histograms, images and text. Null on other ranks than 0.
  TensorBoardWriter* tensorboard();

 private:
  template <class Range>
  friend class detail::RunBatches;
  class Impl;

  class StepGuard;
  class WaitGuard;

  /// The data of a loop.
  struct Loop {
    int64_t batches = 0;  // in a whole epoch; 0 if unknown
    // Of the position in a sampler or a StreamLoader; empty if there is none. load() returns whether the epoch is not
    // complete.
    std::function<Value()> save{};
    std::function<bool(const Value&)> load{};
  };

  void begin_step();
  void end_step();
  void abandon_step();
  void record(std::string_view name, double value, const MetricOptions& options);
  void record(std::string_view name, const at::Tensor& value, const MetricOptions& options);
  double default_weight() const;
  /// Returns how many elements of the range to skip; none if the loop was complete when the run was interrupted.
  std::optional<int64_t> begin_loop(Loop loop);
  /// Throws UsageError on all ranks if their numbers of batches differ. Collective.
  void check_batches(int64_t batches) const;
  void begin_wait();
  void end_wait();
  void took_batch(int64_t samples, std::chrono::nanoseconds waited);
  void end_loop();

  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep

#include <lockstep/detail/training_run_inl.h>
