#pragma once

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <numeric>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <c10/core/Device.h>

#include <lockstep/batch_iterator.h>
#include <lockstep/collate.h>
#include <lockstep/data_loader.h>
#include <lockstep/export.h>
#include <lockstep/process_group.h>
#include <lockstep/tensors_in.h>
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

namespace detail {

/// Reads one part of the data, batch by batch. Used by one thread at a time.
class PartReader {
 public:
  struct Read {
    std::shared_ptr<void> batch{};  // null at the end of the part
    int64_t samples = 0;
  };

  virtual ~PartReader() = default;
  virtual Read next() = 0;
};

/// The part of a StreamLoader that does not depend on the type of its samples.
class LOCKSTEP_EXPORT StreamCore {
 public:
  using Batch = std::shared_ptr<void>;
  /// Opens a part and skips its first samples. Called concurrently for different parts.
  using Open = std::function<std::unique_ptr<PartReader>(const StreamPart& part, int64_t skipped)>;

  /// `on_next` is called for a batch as soon as it is made and the next one of its worker.
  StreamCore(ProcessGroup group, const StreamLoaderOptions& options, bool finds_tensors, Open open,
             const LoaderCore::OnNext& on_next);
  ~StreamCore();

  uint64_t begin();           // returns the number of the new loop
  Batch next(uint64_t loop);  // empty at the end
  void set_epoch(int64_t epoch);
  int64_t epoch() const;
  int64_t next_epoch() const;
  Value state_dict() const;
  void load_state_dict(const Value& state);
  std::chrono::nanoseconds waited() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

LOCKSTEP_EXPORT DataLoaderOptions loading_options(const StreamLoaderOptions& options);
/// Rethrows the current exception with the name of the function that threw it in the message.
[[noreturn]] LOCKSTEP_EXPORT void rethrow_from(const char* function);
[[noreturn]] LOCKSTEP_EXPORT void refuse_shorter_stream(int64_t samples, int64_t skipped);

template <class Stream>
concept ReadsNext = requires(Stream& stream) {
  stream.next();
};
template <class Stream>
concept Skips = requires(Stream& stream) {
  stream.skip(int64_t{});
};

/// Returns the stream, or the stream that a pointer points to.
template <class Opened>
auto& stream_in(Opened& opened) {
  if constexpr (ReadsNext<Opened>)
    return opened;
  else
    return *opened;
}

template <class Opened>
using SampleIn = std::remove_cvref_t<decltype(*stream_in(std::declval<Opened&>()).next())>;

template <class Open, class Collate>
class StreamReader : public PartReader {
  using Opened = std::invoke_result_t<Open&, const StreamPart&>;
  using Sample = SampleIn<Opened>;
  using Collated = detail::Collated<std::vector<Sample>, Collate>;

 public:
  StreamReader(Open& open, Collate& collate, const DataLoaderOptions& options, const StreamPart& part, int64_t skipped)
      : collate_(collate), options_(options), opened_(opened(open, part)) {
    if (skipped > 0) skip(skipped);
  }

  Read next() override {
    std::vector<Sample> samples;
    while (!has_ended_ && samples.size() < static_cast<size_t>(options_.batch_size)) {
      auto sample = read();
      if (sample)
        samples.push_back(*std::move(sample));
      else
        has_ended_ = true;
    }
    const auto count = static_cast<int64_t>(samples.size());
    if (count == 0 || (options_.drop_last && count < options_.batch_size)) return {};
    using Loaded = LoadedBatch<typename Collated::Batch>;
    auto loaded = std::make_shared<Loaded>(Loaded{collated(std::move(samples))});
    loaded->pin(options_);
    return {std::move(loaded), count};
  }

 private:
  static Opened opened(Open& open, const StreamPart& part) {
    try {
      return open(part);
    } catch (...) {
      rethrow_from("open()");
    }
  }

  // Counts the samples, and names the sample that cannot be read.
  auto read() {
    try {
      auto sample = stream_in(opened_).next();
      if (sample) ++position_;
      return sample;
    } catch (...) {
      rethrow_about(position_);
    }
  }

  void skip(int64_t samples) {
    if constexpr (Skips<std::remove_reference_t<decltype(stream_in(opened_))>>) {
      try {
        stream_in(opened_).skip(samples);
      } catch (...) {
        rethrow_from("skip()");
      }
      position_ = static_cast<size_t>(samples);
    } else {
      for (int64_t i = 0; i < samples; ++i)
        if (!read()) refuse_shorter_stream(i, samples);
    }
  }

  auto collated(std::vector<Sample> samples) {
    const size_t count = samples.size();
    try {
      return Collated::make(collate_, std::move(samples));
    } catch (...) {
      std::vector<size_t> numbers(count);
      std::iota(numbers.begin(), numbers.end(), position_ - count);
      rethrow_about(numbers);
    }
  }

  Collate& collate_;
  const DataLoaderOptions& options_;
  size_t position_ = 0;  // samples of the part that were read or skipped
  bool has_ended_ = false;
  Opened opened_;
};

}  // namespace detail

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

  StreamLoader(Made, Open open, ProcessGroup group, Collate collate, const StreamLoaderOptions& options)
      : options_(detail::loading_options(options)),
        copies_(options.device),
        open_(std::move(open)),
        collate_(std::move(collate)),
        core_(
            std::move(group), options, TensorsIn<Batch>::kAny,
            [this](const StreamPart& part, int64_t skipped) {
              return std::make_unique<detail::StreamReader<Open, Collate>>(open_, collate_, options_, part, skipped);
            },
            [this](void* next) { static_cast<Loaded*>(next)->start_copy(copies_); }) {}

  std::shared_ptr<Batch> next(uint64_t loop) {
    const auto loaded = std::static_pointer_cast<Loaded>(core_.next(loop));
    if (!loaded) return nullptr;
    loaded->finish_copy(copies_);
    return {loaded, &loaded->batch};
  }

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
