#pragma once

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <lockstep/batch_iterator.h>
#include <lockstep/collate.h>
#include <lockstep/distributed_sampler.h>
#include <lockstep/export.h>
#include <lockstep/tensors_in.h>

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

namespace detail {

/// The part of a loader that does not depend on the type of its samples: splits a sampler's samples into batches, which
/// worker threads make.
class LOCKSTEP_EXPORT LoaderCore {
 public:
  using Samples = std::vector<size_t>;
  using Batch = std::shared_ptr<void>;
  using Make = std::function<Batch(int worker, const Samples& samples, int64_t epoch)>;
  /// Called for a batch once it has been created and is the next batch to deliver.
  using OnNext = std::function<void(void* batch)>;

  /// `has_sampler`: the program has passed the sampler. Otherwise it is that of sampler_of_own_data().
  LoaderCore(DistributedSampler sampler, bool has_sampler, const DataLoaderOptions& options,
             std::optional<size_t> dataset_size, bool finds_tensors, Make make, OnNext on_next);
  ~LoaderCore();

  uint64_t begin();           // returns the number of the new loop
  Batch next(uint64_t loop);  // empty at the end
  size_t size() const;
  DistributedSampler sampler() const;
  bool has_sampler() const;
  std::chrono::nanoseconds waited() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Returns the sampler of a DataLoader that was made without one. Throws UsageError if the size is 0 or unknown.
LOCKSTEP_EXPORT DistributedSampler sampler_of_own_data(std::optional<size_t> dataset_size,
                                                       const DataLoaderOptions& options);

/// Throws UsageError for options that no loader accepts, in the name of `loader`.
void check_loading(const char* loader, std::optional<int> rank, const DataLoaderOptions& options, bool finds_tensors);

/// Returns whether batches are copied to pinned memory.
LOCKSTEP_EXPORT bool pins_memory(const DataLoaderOptions& options);

/// Copies tensors to the device of a loader. A copy to a GPU can be started ahead of the loop; it then runs on a stream
/// that is used for such copies only, at the same time as the work of the loop. Thread-safe.
class LOCKSTEP_EXPORT DeviceCopies {
 public:
  using Tensors = std::vector<at::Tensor*>;
  /// A copy that was started. Empty if none was.
  using Started = std::shared_ptr<void>;

  /// A GPU without an index is the current one. Copies nothing without a device.
  explicit DeviceCopies(std::optional<c10::Device> device);

  /// Replaces the tensors by copies on the GPU, which nobody may use before finish(). Does nothing without a GPU.
  Started start(const Tensors& tensors) const;
  /// Lets the current stream wait for the copies. Makes the copies itself if they were not started.
  void finish(const Tensors& tensors, const Started& started) const;

 private:
  std::optional<c10::Device> device_;
};

/// A batch of a loader, and its copy to the loader's device.
template <class Batch>
struct LoadedBatch {
  /// Call it on the thread that makes the batch.
  void pin(const DataLoaderOptions& options) {
    if (!pins_memory(options)) return;
    TensorsIn<Batch>::visit(batch, [](at::Tensor& tensor) {
      if (tensor.device().is_cpu()) tensor = tensor.pin_memory();
    });
  }
  void start_copy(const DeviceCopies& copies) { started = copies.start(tensors()); }
  /// Call it on the thread of the loop.
  void finish_copy(const DeviceCopies& copies) { copies.finish(tensors(), started); }

  DeviceCopies::Tensors tensors() {
    DeviceCopies::Tensors found;
    TensorsIn<Batch>::visit(batch, [&](at::Tensor& tensor) { found.push_back(&tensor); });
    return found;
  }

  Batch batch;
  DeviceCopies::Started started{};
};

/// Returns the number of batches in this many samples.
LOCKSTEP_EXPORT size_t batches_in(size_t samples, const DataLoaderOptions& options);

/// Returns the seed of a sample's generator, which depends on the sampler's seed, the epoch and the sample. With a
/// million samples, two of them share a seed with a probability of 3e-8.
LOCKSTEP_EXPORT uint64_t sample_seed(uint64_t seed, int64_t epoch, size_t sample);
/// Seeds a CPU generator with all 64 bits; LibTorch's set_current_seed uses only 32 of them.
LOCKSTEP_EXPORT void seed_generator(at::Generator& random, uint64_t seed);

/// Throws UsageError for invalid options. `dataset_size` is none if it is unknown.
LOCKSTEP_EXPORT void check_loader_options(const DataLoaderOptions& options, const DistributedSampler& sampler,
                                          std::optional<size_t> dataset_size, bool finds_tensors);

/// Returns "sample 7", or "samples 3 9 15".
LOCKSTEP_EXPORT std::string name_samples(c10::ArrayRef<size_t> samples);
/// Rethrows the current exception with the samples' indices in the message.
[[noreturn]] LOCKSTEP_EXPORT void rethrow_about(c10::ArrayRef<size_t> samples);

template <class Data>
concept ReadsWithGenerator = requires(Data& data, at::Generator& random) {
  data.get(size_t{}, random);
};
template <class Data>
concept Gathers = requires(Data& data, c10::ArrayRef<size_t> samples) {
  data.gather(samples);
};
template <class Data>
concept ReadsSamples = requires(Data& data) {
  data.get(size_t{});
};
template <class Data>
concept ReadsBatches = requires(Data& data, c10::ArrayRef<size_t> samples) {
  data.get_batch(samples);
};

/// Returns the dataset, or the dataset that a shared pointer points to.
template <class Data>
Data& dataset_in(Data& data) {
  return data;
}
template <class Data>
Data& dataset_in(std::shared_ptr<Data>& data) {
  return *data;
}
template <class Data>
using DatasetIn = std::remove_reference_t<decltype(dataset_in(std::declval<Data&>()))>;

template <class Data>
auto read_sample(Data& data, size_t sample, at::Generator& random, uint64_t seed) {
  try {
    if constexpr (ReadsWithGenerator<Data>) {
      seed_generator(random, seed);
      return data.get(sample, random);
    } else {
      return data.get(sample);
    }
  } catch (...) {
    rethrow_about(sample);
  }
}

/// `gather` is used only without a custom collate function, which needs individual samples.
template <class Data, class Collate>
constexpr bool kGathers = Gathers<Data>&& std::is_same_v<Collate, Stack>;

template <class Data, class Collate>
auto read_batch(Data& data, c10::ArrayRef<size_t> samples) {
  try {
    if constexpr (kGathers<Data, Collate>)
      return data.gather(samples);
    else
      return data.get_batch(samples);
  } catch (...) {
    rethrow_about(samples);
  }
}

/// Returns a vector of samples, or a batch if the dataset makes batches itself.
template <class Data, class Collate>
auto read_samples(Data& data, const std::vector<size_t>& samples, uint64_t seed, int64_t epoch) {
  if constexpr (ReadsWithGenerator<Data> || (ReadsSamples<Data> && !kGathers<Data, Collate>)) {
    at::Generator random;
    if constexpr (ReadsWithGenerator<Data>) random = at::detail::createCPUGenerator();
    std::vector<decltype(read_sample(data, 0, random, 0))> read;
    read.reserve(samples.size());
    for (size_t sample : samples) read.push_back(read_sample(data, sample, random, sample_seed(seed, epoch, sample)));
    return read;
  } else {
    return read_batch<Data, Collate>(data, samples);
  }
}

template <class Data, class Collate>
using SamplesOf = decltype(read_samples<Data, Collate>(std::declval<Data&>(), {}, 0, 0));

template <class Samples, class Collate>
struct Collated {
  using Batch = Samples;
  static Batch make(Collate&, Samples samples) { return samples; }
};
template <class Sample, class Collate>
struct Collated<std::vector<Sample>, Collate> {
  using Batch = std::invoke_result_t<Collate&, std::vector<Sample>>;
  static Batch make(Collate& collate, std::vector<Sample> samples) { return collate(std::move(samples)); }
};

}  // namespace detail

/// Reads the samples of this rank ahead of the training loop and groups them into batches:
///
///     lockstep::DataLoader loader(dataset, sampler, {.batch_size = 64, .num_workers = 2});
///     for (int epoch = 0; epoch < epochs; ++epoch) {
///       sampler.set_epoch(epoch);
///       for (auto& batch : loader) train(batch.data, batch.target);
///     }
///
/// Without a sampler, all samples of the dataset are this rank's: for ranks that each have data of their own, such as
/// the files that lie on their disk, or the episodes that they have played.
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
             const DataLoaderOptions& options)
      : options_(options),
        copies_(options.device),
        seed_(sampler ? sampler->options().seed : options.seed),
        collate_(std::move(collate)),
        datasets_(static_cast<size_t>(options.num_workers > 1 ? options.num_workers : 1), std::move(dataset)),
        core_(
            sampler ? *sampler : detail::sampler_of_own_data(known_size(), options), sampler.has_value(), options,
            known_size(), TensorsIn<Batch>::kAny,
            [this](int worker, const Samples& samples, int64_t epoch) { return make(worker, samples, epoch); },
            [this](void* next) { static_cast<Loaded*>(next)->start_copy(copies_); }) {}

  std::optional<size_t> known_size() {
    if constexpr (SizedDataset<Dataset>) {
      const torch::optional<size_t> size = detail::dataset_in(datasets_.front()).size();
      if (size.has_value()) return *size;
    }
    return std::nullopt;
  }

  std::shared_ptr<void> make(int worker, const Samples& samples, int64_t epoch) {
    auto& dataset = detail::dataset_in(datasets_[static_cast<size_t>(worker)]);
    auto read = detail::read_samples<Dataset, Collate>(dataset, samples, seed_, epoch);
    auto loaded = std::make_shared<Loaded>(Loaded{collated(std::move(read), samples)});
    loaded->pin(options_);
    return loaded;
  }

  Batch collated(Read read, const Samples& samples) {
    try {
      return Collated::make(collate_, std::move(read));
    } catch (...) {
      detail::rethrow_about(samples);
    }
  }

  std::shared_ptr<Batch> next(uint64_t loop) {
    const auto loaded = std::static_pointer_cast<Loaded>(core_.next(loop));
    if (!loaded) return nullptr;
    loaded->finish_copy(copies_);
    return {loaded, &loaded->batch};
  }

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
