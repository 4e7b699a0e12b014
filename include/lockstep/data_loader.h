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
#include <lockstep/detail/dataset_reading.h>
#include <lockstep/detail/loaded_batch.h>
#include <lockstep/detail/loader_core.h>
#include <lockstep/distributed_sampler.h>

namespace lockstep {

struct DataLoaderOptions {
  int64_t batch_size = 1;  ///< Samples in a batch on this rank.
  bool shuffle = false;    ///< Another order in each epoch. Only without a sampler: with one, an option of the sampler.
  uint64_t seed = 0;       ///< Of the orders and of the samples' random numbers. Only without a sampler, too.
  bool drop_last = false;  ///< Drop the last batch of an epoch if it is smaller than batch_size.
  int num_workers = 1;     ///< Threads that read ahead. With 0 the loop's own thread reads each batch on demand.
  int prefetch_factor = 2;  ///< How many batches each worker may be ahead of the loop.
  bool pin_memory = false;  ///< Deliver batches in pinned memory, for fast copies to a GPU. Ignored without CUDA.
  std::optional<c10::Device> device{};  ///< Device of the batches. Copies to a GPU run ahead of the loop.
};

/// Reads the samples of this rank ahead of the training loop and groups them into batches:
///
///     lockstep::DataLoader loader(dataset, sampler, {.batch_size = 64, .num_workers = 2});
///     for (int epoch = 0; epoch < epochs; ++epoch) {
///       sampler.set_epoch(epoch);
///       for (auto& batch : loader) train(batch.data, batch.target);
///     }
///
/// Without a sampler, this rank gets all samples of the dataset: for ranks that each have their own data, such as the
/// files on their disk, or the episodes that they have played.
///
///     lockstep::DataLoader loader(my_episodes, {.batch_size = 64, .shuffle = true});
///
/// Each loop then begins a new epoch when the last one is complete, unless set_epoch() of sampler() is called. Ranks
/// may have different numbers of batches: train in join().
///
/// Not collective. The contents and the order of batches depend neither on the number of workers nor on timing. The
/// dataset must have at least one of these methods; the first in this list is used:
///   - `get(size_t index, at::Generator& random)`: `random` is seeded for each sample from the sampler's seed, the
///     epoch and the index. Random augmentation that uses it is the same with any number of workers and ranks, and
///     after a resume.
///   - `gather(ArrayRef<size_t>)`: returns the whole batch. For data in memory, where the overhead of each read exceeds
///     the copy. Not used if there is a custom `collate`.
///   - `get(size_t index)`, as in torch::data::datasets::Dataset.
///   - `get_batch(ArrayRef<size_t>)`, as in torch::data::datasets::BatchDataset and the result of `.map(...)`: returns
///     a vector of samples, which is collated, or a value of another type, which is used as the batch.
/// `collate` turns a vector of samples into a batch; the default is Stack. Each worker reads its own copy of the
/// dataset, so `get` need not be thread-safe. If the dataset is a std::shared_ptr, the workers share the object.
/// Workers read with autograd disabled, and LibTorch operations in a worker use one thread.
///
/// The sampler's position is the position of the loop, not of the workers. A sampler that was saved inside a loop and
/// is loaded later continues with the next batch. After a loop that was left early, the next loop restarts the epoch.
///
/// If the dataset throws, the loop throws when it reaches that batch, and ends. The message names rank, epoch and
/// sample. Errors of lockstep keep their type; other exceptions are nested in an Error. The constructor throws
/// UsageError for invalid options, and if the sampler and the dataset have different sizes; without a sampler, if the
/// dataset is empty or does not know its size.
///
/// Not thread-safe. Only one loop may run at a time: when a second loop has begun, the first throws UsageError.
template <class Data, class Collate = Stack>
class DataLoader {
  using Dataset = detail::DatasetIn<Data>;
  static_assert(std::copy_constructible<Data>,
                "Each worker copies the dataset: make it copyable or pass a std::shared_ptr to it.");
  static_assert(detail::ReadsWithGenerator<Dataset> || detail::kGathers<Dataset, Collate> ||
                    detail::ReadsSamples<Dataset> || detail::ReadsBatches<Dataset>,
                "A dataset needs get(size_t, at::Generator&), gather(ArrayRef<size_t>), get(size_t) or "
                "get_batch(ArrayRef<size_t>).");
  using Samples = detail::LoaderCore::Samples;
  using Read = detail::SamplesOf<Dataset, Collate>;
  using Collated = detail::Collated<Read, Collate>;

 public:
  using Batch = typename Collated::Batch;

  explicit DataLoader(Data dataset, DistributedSampler sampler,
                      DataLoaderOptions options = {}) requires std::is_same_v<Collate, Stack>
      : DataLoader(Made(), std::move(dataset), std::move(sampler), Stack(), options) {}

  /// Calls `collate` with a std::vector of samples, from several threads at a time.
  DataLoader(Data dataset, DistributedSampler sampler, Collate collate,
             DataLoaderOptions options = {}) requires(!std::is_same_v<Collate, Stack>)
      : DataLoader(Made(), std::move(dataset), std::move(sampler), std::move(collate), options) {}

  /// Without a sampler: reads all samples of the dataset, in order or shuffled.
  explicit DataLoader(Data dataset,
                      DataLoaderOptions options = {}) requires SizedDataset<Dataset> && std::is_same_v<Collate, Stack>
      : DataLoader(Made(), std::move(dataset), std::nullopt, Stack(), options) {}
  DataLoader(Data dataset, Collate collate, DataLoaderOptions options = {}) requires SizedDataset<Dataset> &&
      (!std::is_same_v<Collate, Stack>)
      : DataLoader(Made(), std::move(dataset), std::nullopt, std::move(collate), options) {}

  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  using Iterator = BatchIterator<DataLoader>;

  /// Begins the sampler's epoch, or continues it after the sampler's load().
  Iterator begin() { return Iterator(this, core_.begin()); }
  std::default_sentinel_t end() const { return {}; }

  /// Returns the number of batches in a whole epoch on this rank.
  int64_t size() const { return static_cast<int64_t>(core_.size()); }

  /// Returns the sampler: a copy, which shares its state with this loader's. Without a sampler, one that has all
  /// samples: for set_epoch(), and for TrainingState::add_per_rank().
  DistributedSampler sampler() const { return core_.sampler(); }

  /// Returns whether a sampler was passed to the constructor. Otherwise all samples of the dataset are this rank's.
  bool has_sampler() const { return core_.has_sampler(); }

  /// Returns the total time that the current or last loop has waited for batches. If this is a large part of the
  /// training time, use more workers.
  std::chrono::nanoseconds waited() const { return core_.waited(); }

 private:
  friend Iterator;
  struct Made {};
  using Loaded = detail::LoadedBatch<Batch>;

  DataLoader(Made, Data dataset, std::optional<DistributedSampler> sampler, Collate collate,
             const DataLoaderOptions& options);
  std::optional<size_t> known_size();
  std::shared_ptr<void> make(int worker, const Samples& samples, int64_t epoch);
  Batch collated(Read read, const Samples& samples);
  std::shared_ptr<Batch> next(uint64_t loop);

  // Constant after construction, except the datasets. Each dataset belongs to one worker.
  const DataLoaderOptions options_;
  const detail::DeviceCopies copies_;
  const uint64_t seed_;
  Collate collate_;
  std::vector<Data> datasets_;
  detail::LoaderCore core_;  // last: its workers use the other members
};

template <class Data>
DataLoader(Data, DistributedSampler, DataLoaderOptions) -> DataLoader<Data>;
template <class Data>
DataLoader(Data, DataLoaderOptions) -> DataLoader<Data>;

}  // namespace lockstep

#include <lockstep/detail/data_loader_inl.h>
