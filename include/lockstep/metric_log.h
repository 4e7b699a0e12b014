#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>

#include <lockstep/export.h>
#include <lockstep/process_group.h>
#include <lockstep/tensorboard_writer.h>
#include <lockstep/value.h>

namespace lockstep {

/// How the values of a metric become one number, over steps and over ranks.
enum class MetricReduction {
  kMean,  ///< weighted
  kSum,
  kMin,
  kMax,
  kLast,  ///< the last value, of the lowest rank that has logged one
};

struct MetricOptions {
  MetricReduction reduce = MetricReduction::kMean;
  /// Of a mean: the number of samples that the value is the mean of. A value with weight 0 does not count.
  double weight = 1;
  /// Leave the metric out of epoch records: for a value that changes from step to step, such as a learning rate.
  bool steps_only = false;
};

struct MetricLogOptions {
  /// How many steps each step record combines. 0: no step records.
  int64_t every = 10;
  /// Write metrics.csv.
  bool csv = true;
  /// Write a TensorBoard event file.
  bool tensorboard = true;
};

/// Records the metrics of a training, over the steps and samples of all ranks, in a folder:
///
///     lockstep::MetricLog metrics(world, "runs/a");
///     for (int epoch = 0; epoch < epochs; ++epoch) {
///       for (auto& batch : loader) {
///         auto loss = train(batch);
///         metrics.log("loss", loss, {.weight = batch_size});
///         metrics.end_step();
///       }
///       metrics.log_epoch("accuracy", evaluate());
///       metrics.end_epoch();
///     }
///
/// Rank 0 writes metrics.jsonl, metrics.csv and an event file for TensorBoard (docs/training_run.md describes them). A
/// step record combines the values of `every` steps, an epoch record the values of an epoch. TrainingRun has a
/// MetricLog.
///
/// log() neither communicates nor blocks: a value on a GPU is added to a sum on the GPU. Records are sent to rank 0 by
/// a separate thread over a separate group, when flush() or end_epoch() is called. If a file cannot be written, for
/// example because the disk is full, rank 0 logs a warning and the training continues. If the values of a record are
/// NaN or infinite, rank 0 logs a warning that names metric, steps and ranks, once for each metric.
///
/// Every rank calls end_step(), flush(), end_epoch() and state_dict() equally often. Inside of join(), where ranks make
/// different numbers of calls, these calls and the constructor throw UsageError, unless throw_on_early_termination is
/// set; log() and log_epoch() are allowed. Ranks may log different metrics. Not thread-safe. Errors of the thread, for
/// example a PeerError, are thrown by the next flush() or end_epoch().
class LOCKSTEP_EXPORT MetricLog {
 public:
  /// Creates the folder. Collective. Throws UsageError for an invalid option, and SystemError on all ranks if rank 0
  /// cannot create the folder.
  MetricLog(ProcessGroup group, std::string folder, MetricLogOptions options = {});
  /// Records that have not reached rank 0 are lost: call flush() or end_epoch() and wait() first. Not collective.
  ~MetricLog();
  MetricLog(const MetricLog&) = delete;
  MetricLog& operator=(const MetricLog&) = delete;

  /// Adds a value of the current step. A tensor has one element, of any real dtype, on any device. Not collective.
  /// Throws UsageError for a tensor of another size, for a name that is empty or one of type, step, epoch and seconds,
  /// for a metric that was logged with another MetricReduction, and for a GPU tensor while a CUDA graph is captured.
  void log(std::string_view name, double value, const MetricOptions& options = {});
  void log(std::string_view name, const at::Tensor& value, const MetricOptions& options = {});
  /// Adds a value of the epoch, which is not part of step records.
  void log_epoch(std::string_view name, double value, const MetricOptions& options = {});
  void log_epoch(std::string_view name, const at::Tensor& value, const MetricOptions& options = {});

  /// Ends a step: its values count from now on. `epoch` is the number of epochs completed, with a fraction, for the
  /// record. Not collective, does not block.
  void end_step(double epoch);
  void end_step() { end_step(static_cast<double>(epochs())); }
  /// Drops the values of a step that has failed.
  void abandon_step();

  /// Sends finished step records to rank 0. Collective, but does not wait for other ranks.
  void flush();
  /// Waits until the records of all flush() calls are written.
  void wait();
  /// Writes the epoch record: the values of log() and log_epoch() since the last one. Returns its metrics on all ranks.
  /// Collective.
  std::map<std::string, double> end_epoch();

  /// The number of steps and of epochs that have ended.
  int64_t steps() const;
  int64_t epochs() const;
  /// The metrics of the newest step record that has been written. Empty on other ranks than 0.
  std::map<std::string, double> latest() const;
  /// For histograms, images and text. Null on other ranks than 0, and without `tensorboard`.
  TensorBoardWriter* tensorboard();

  /// The position and the sums since the last records, of all ranks, for a TrainingState. Collective: blocks until all
  /// values are known. A log that loads it continues the files: it removes records after that position first.
  Value state_dict() const;
  void load_state_dict(const Value& state);

 private:
  friend class TrainingRun;
  class Impl;

  /// Describes the first metric that this rank has logged as NaN or infinity since the last call: "metric 'loss' in
  /// step 13". Call it before flush() and end_epoch(). Blocks until values on a GPU are known. Not collective.
  std::optional<std::string> take_non_finite();

  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
