#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/export.h>
#include <lockstep/metric_mode.h>
#include <lockstep/process_group.h>
#include <lockstep/training_state.h>

namespace lockstep {

/// What save() does if the checkpoint cannot be written: the disk is full, the folder is read-only, or writing fails.
enum class OnSaveError {
  kWarn,   ///< log a warning and continue; save() returns false
  kThrow,  ///< throw CheckpointError on all ranks
};

struct CheckpointDirectoryOptions {
  /// How many of the newest checkpoints to keep. 0: all.
  int keep_last = 3;
  /// Also keep the checkpoints whose number is a multiple of this. 0: none.
  int64_t keep_every = 0;
  /// Also keep the checkpoint with the best value of this metric, as best.pt. Empty: none. Checkpoints that are saved
  /// without the metric, or with NaN, do not count.
  std::string best{};
  MetricMode best_mode = MetricMode::kMax;
  /// What the numbers of checkpoints count: the name of the files, and the key of the number in them.
  std::string unit = "step";
  /// Write in the background. save() then returns when the state is copied in memory, which takes as much memory as the
  /// state. A failure is reported by the next save() or wait().
  bool asynchronous = false;
  /// Each rank writes its shard of sharded objects (ZeroRedundancyOptimizer), instead of rank 0 collecting them. Any
  /// number of ranks can load them. `lockstep checkpoint convert` merges the shards into one file for Python.
  bool sharded = false;
  OnSaveError on_error = OnSaveError::kWarn;
  /// A checkpoint without an entry for a part of the state is an error. Otherwise the part keeps its value, with a
  /// warning that names it: for a state that has got new parts.
  bool strict = true;
};

/// A folder of checkpoints of one training run:
///
///     lockstep::CheckpointDirectory checkpoints(world, "runs/a", {.best = "accuracy", .unit = "epoch"});
///     for (int64_t epoch = checkpoints.resume(state); epoch < epochs; ++epoch) {
///       train(epoch);
///       checkpoints.save(epoch, state, {{"accuracy", evaluate()}});
///     }
///
/// Files are named after unit and number ("epoch-00000003.pt") and are in the format of save_checkpoint(). In addition
/// to the state, a file has the entries "metrics", "world_size", "lockstep" (the version) and the number, named after
/// the unit. A file appears under its name only when it is complete. With shards, the file of rank 0 is published last
/// and lists the shards' files and their SHA-256.
///
/// All ranks must see the same folder. Rank 0 creates it and locks it: a second job that uses it at the same time is
/// refused. Methods are collective unless they say otherwise. Not thread-safe. After a PeerError the state may be
/// inconsistent: save() throws then, because the group is broken.
class LOCKSTEP_EXPORT CheckpointDirectory {
 public:
  /// Creates the folder if it is missing, and removes temporary files of jobs that have died. Throws UsageError on all
  /// ranks if another job uses the folder (the message names it) or an option is invalid, SystemError if the folder
  /// cannot be created, CheckpointError if a rank does not see it.
  CheckpointDirectory(ProcessGroup group, std::string folder, CheckpointDirectoryOptions options = {});
  /// Waits for an asynchronous save of this rank to end. Not collective.
  ~CheckpointDirectory();
  CheckpointDirectory(const CheckpointDirectory&) = delete;
  CheckpointDirectory& operator=(const CheckpointDirectory&) = delete;

  /// Saves the state after step or epoch `number`. `metrics` are those of rank 0. Returns when the checkpoint is on
  /// disk or, if asynchronous, when the state is copied; then first waits for the previous save. Afterwards removes
  /// checkpoints that are not to be kept: never the new checkpoint, nor checkpoints with a higher number. Returns false
  /// on all ranks if writing, or the previous asynchronous writing, failed and on_error is kWarn; earlier checkpoints
  /// are unchanged. A folder that cannot be synced counts as failure: the new checkpoint exists, but a crash might lose
  /// it.
  /// Throws UsageError on all ranks if a part of the state cannot be saved or has the name of another entry.
  bool save(int64_t number, const TrainingState& state, const std::map<std::string, double>& metrics = {});

  /// Waits for an asynchronous save. Returns and throws as save() does.
  bool wait();

  /// Why the last save() that has ended failed; empty if it succeeded or there was none. After wait() it is the same on
  /// all ranks: if it is empty, the last saved checkpoint is on disk. Not collective.
  const std::string& last_error() const;

  /// Loads the newest checkpoint that is intact into the state. Returns the number to continue with: the checkpoint's
  /// number plus 1, or 0 if the folder has no checkpoint. Damaged checkpoints are skipped with a warning that names the
  /// damage. A checkpoint counts as damaged if any rank reads damage in it, does not see it, or reads another file than
  /// rank 0; the message names these ranks and the first record that differs. Throws CheckpointError on all ranks if
  /// all checkpoints are damaged. If a part of the state does not fit, or a rank reads damage in a shard that was
  /// intact when another rank verified it, throws an error that names it on all ranks; the state may have changed
  /// partially then.
  int64_t resume(const TrainingState& state);

  /// Loads the checkpoint of this number into the state, and returns as resume() does. Throws CheckpointError on all
  /// ranks if it is missing or damaged on any rank.
  int64_t load(int64_t number, const TrainingState& state);

  /// The same for the checkpoint with the best metric (best.pt), for example to evaluate it.
  int64_t load_best(const TrainingState& state);

  /// Returns the file of a number. Not collective.
  std::string path(int64_t number) const;
  /// Returns the numbers of the checkpoints in the folder, in ascending order, without verifying them. Not collective.
  std::vector<int64_t> numbers() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
