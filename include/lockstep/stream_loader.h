#pragma once

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <c10/core/Device.h>

#include <lockstep/batch_iterator.h>
#include <lockstep/collate.h>
#include <lockstep/data_loader.h>
#include <lockstep/detail/dataset_reading.h>
#include <lockstep/detail/loaded_batch.h>
#include <lockstep/detail/stream_core.h>
#include <lockstep/detail/stream_reader.h>
#include <lockstep/process_group.h>
#include <lockstep/value.h>

namespace lockstep {

/// The part of a job's data that one stream reads: for example the files, or the records, whose number modulo `count`
/// is `index`.
struct StreamPart {
  int index = 0;
  int count = 1;
  int64_t epoch = 0;
  uint64_t seed = 0;  ///< For random numbers. Differs between parts and between epochs.
};

/// When a loop over a StreamLoader ends, if the ranks have different numbers of batches.
enum class StreamEnd {
  kTogether,  ///< On all ranks in the same step: when the first of them has no further batch. For training.
  kEach       ///< On each rank when it has no further batch. For evaluation, and for training in join().
};

struct StreamLoaderOptions {
  int64_t batch_size = 1;   ///< Samples in a batch on this rank.
  bool drop_last = false;   ///< Drop the last batch of each part if it is smaller than batch_size.
  int num_workers = 1;      ///< Threads that read ahead, at most one for each part of this rank. With 0 the loop reads.
  int prefetch_factor = 2;  ///< How many batches each worker may be ahead of the loop.
  bool pin_memory = false;  ///< Deliver batches in pinned memory, for fast copies to a GPU. Ignored without CUDA.
  std::optional<c10::Device> device{};  ///< Device of the batches. Copies to a GPU run ahead of the loop.
  /// Into how many parts the data of the job is divided. A multiple of the number of ranks. 0: one part for each worker
  /// of each rank.
  int parts = 0;
  uint64_t seed = 0;  ///< From which the parts' seeds are computed. Must be the same on every rank.
  StreamEnd end = StreamEnd::kTogether;
  int64_t max_batches = 0;  ///< The most batches of a rank in an epoch; needed for endless streams. 0: no limit.
};

/// Reads streams, whose size is unknown, ahead of the training loop and groups their samples into batches:
///
///     auto open = [](const lockstep::StreamPart& part) { return EventLog("events.log", part.index, part.count); };
///     lockstep::StreamLoader loader(open, world, {.batch_size = 64, .num_workers = 2});
///     for (int epoch = 0; epoch < epochs; ++epoch) {
///       loader.set_epoch(epoch);
///       for (auto& batch : loader) train(batch);
///     }
///
/// The data of the job is divided into `parts` parts. Of n ranks, rank r reads the parts r, r + n, r + 2n, ... In each
/// epoch, `open` is called once for each part, and returns a stream of its samples, or a pointer to one. A stream is
/// any class with
///   - `std::optional<Sample> next()`: returns the next sample, none at the end. Not called again after the end.
///   - `void skip(int64_t samples)`, optional: called at most once, before next(), when an epoch continues after a
///     resume. Without it, the loader reads and drops the samples.
/// For a given part, a stream must return the same samples in each run. Random numbers must come from `part.seed`.
///
/// A batch has samples of one part, and is made as DataLoader makes it: `collate` turns a vector of samples into a
/// batch; the default is Stack. The next batch of a rank is that of its part with the fewest batches so far, of the
/// lowest index among several, until all parts have ended: the order of Python's DataLoader with one worker for each
/// part. The contents and the order of batches depend on `parts`, neither on `num_workers` nor on timing. The parts of
/// a rank are divided between its workers; all of them are open at the same time. A part is opened and read by one
/// worker, so a stream need not be thread-safe. It may be destroyed by another thread. `open` and `collate` are called
/// by several threads at a time. Workers read with autograd disabled, and LibTorch operations in a worker use one
/// thread.
///
/// With StreamEnd::kTogether every step of the loop is collective: one small all-reduce over the group, of a CPU tensor
/// if the group supports them. All ranks leave the loop in the same step, and no rank may leave it alone. Samples that
/// some ranks have left are not delivered in this epoch. If a stream throws on one rank, all ranks throw in the same
/// step, with the same type and message. MismatchError if the ranks have different epochs, positions or options. With
/// StreamEnd::kEach the loop is not collective.
///
/// The position is that of the loop, not of the workers. TrainingState::add() and TrainingRun::batches() save and load
/// it. After a loop that was left early, the next loop restarts the epoch.
///
/// If `open`, a stream or `collate` throws, the loop throws when it reaches that batch, and ends. The message names
/// rank, epoch, part and the number of the sample in the part. Errors of lockstep keep their type; other exceptions are
/// nested in an Error. The constructor is not collective. It throws UsageError for invalid options, and if this process
/// is not in the group.
///
/// Not thread-safe. Only one loop may run at a time: when a second loop has begun, the first throws UsageError.
template <class Open, class Collate = Stack>
class StreamLoader {
  static_assert(
      std::invocable<Open&, const StreamPart&>,
      "The first argument of StreamLoader is a function that takes a const StreamPart& and returns a stream.");
  using Opened = std::invoke_result_t<Open&, const StreamPart&>;
  static_assert(
      detail::ReadsNext<Opened> || requires(Opened & opened) { (*opened).next(); },
      "A stream needs std::optional<Sample> next().");
  using Collated = detail::Collated<std::vector<detail::SampleIn<Opened>>, Collate>;

 public:
  using Batch = typename Collated::Batch;
  using Iterator = BatchIterator<StreamLoader>;

  explicit StreamLoader(Open open, ProcessGroup group,
                        StreamLoaderOptions options = {}) requires std::is_same_v<Collate, Stack>
      : StreamLoader(Made(), std::move(open), std::move(group), Stack(), options) {}

  /// Calls `collate` with a std::vector of samples, from several threads at a time.
  StreamLoader(Open open, ProcessGroup group, Collate collate,
               StreamLoaderOptions options = {}) requires(!std::is_same_v<Collate, Stack>)
      : StreamLoader(Made(), std::move(open), std::move(group), std::move(collate), options) {}

  StreamLoader(const StreamLoader&) = delete;
  StreamLoader& operator=(const StreamLoader&) = delete;

  /// Begins epoch(), or continues it after load_state_dict().
  Iterator begin() { return Iterator(this, core_.begin()); }
  std::default_sentinel_t end() const { return {}; }

  /// Sets the epoch that the next loop begins. Call it with the same number on every rank. Without it every epoch has
  /// the same seeds. Throws UsageError for a negative epoch.
  void set_epoch(int64_t epoch) { core_.set_epoch(epoch); }
  int64_t epoch() const { return core_.epoch(); }

  /// Returns the epoch with which to continue after load_state_dict(): epoch(), or epoch() + 1 if epoch() is complete.
  int64_t next_epoch() const { return core_.next_epoch(); }

  /// Returns the epoch, and how many samples of each part of the job the loops have received. Collective over the
  /// group: every rank gets the same value. Throws MismatchError if the ranks are in different epochs.
  Value state_dict() const { return core_.state_dict(); }

  /// Continues at the saved epoch and position: the next loop begins with the batch after the last one that was
  /// received. A later set_epoch() with a different epoch discards the position. Not collective: every rank loads the
  /// state. The number of workers may differ, and the number of ranks, if `parts` is a multiple of it: each sample of
  /// the epoch is then delivered once by some rank. Throws UsageError, and changes nothing, if the saved position is
  /// inside an epoch with different parts, batch_size or seed.
  void load_state_dict(const Value& state) { core_.load_state_dict(state); }

  /// Returns the total time that the current or last loop has waited for batches of this rank, without the time that
  /// it has waited for other ranks.
  std::chrono::nanoseconds waited() const { return core_.waited(); }

 private:
  friend Iterator;
  struct Made {};
  using Loaded = detail::LoadedBatch<Batch>;

  StreamLoader(Made, Open open, ProcessGroup group, Collate collate, const StreamLoaderOptions& options);
  std::shared_ptr<Batch> next(uint64_t loop);

  // Constant after construction.
  const DataLoaderOptions options_;
  const detail::DeviceCopies copies_;
  Open open_;
  Collate collate_;
  detail::StreamCore core_;  // last: its workers use the other members
};

template <class Open>
StreamLoader(Open, ProcessGroup, StreamLoaderOptions) -> StreamLoader<Open>;
template <class Open>
StreamLoader(Open, ProcessGroup) -> StreamLoader<Open>;

}  // namespace lockstep

#include <lockstep/detail/stream_loader_inl.h>
