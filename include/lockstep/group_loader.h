#pragma once

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <lockstep/batch_iterator.h>
#include <lockstep/collate.h>
#include <lockstep/data_loader.h>
#include <lockstep/distributed_sampler.h>
#include <lockstep/export.h>
#include <lockstep/process_group.h>
#include <lockstep/safetensors.h>

namespace lockstep {

/// Which ranks read, and for which other ranks. A group that does not contain this rank is ignored. The groups must
/// support CPU tensors.
struct ReadingGroups {
  /// Rank 0 of this group reads for all its ranks. Each rank gets the batches of its own sampler.
  std::optional<ProcessGroup> scatter{};
  /// Rank 0 of this group sends its batches to all its ranks. Their samplers must be equal.
  std::optional<ProcessGroup> broadcast{};
};

namespace detail {

/// A batch in transit: safetensors bytes, or an error message.
struct BatchMessage {
  enum class Kind : int64_t { kEnd, kBatch, kError };
  Kind kind = Kind::kEnd;
  int64_t samples = 0;
  std::string bytes{};
};

/// The part of GroupLoader that does not depend on the type of its samples: decides which rank reads for which ranks,
/// and sends the batches.
class LOCKSTEP_EXPORT GroupReading {
 public:
  GroupReading(ReadingGroups groups, DistributedSampler sampler, const DataLoaderOptions& options);
  ~GroupReading();

  bool reads() const;
  std::vector<DistributedSampler> samplers() const;  // of the ranks for which this rank reads
  void agree(const std::string& error) const;        // throws on all ranks if a reader passes an error

  uint64_t begin();                                             // collective; returns the number of the new loop
  void place(std::vector<DistributedSampler>& samplers) const;  // moves them to this rank's epoch and position
  void require_current(uint64_t loop) const;
  /// Takes one message for each rank for which this rank reads. Returns this rank's message.
  BatchMessage distribute(std::vector<BatchMessage> messages);
  size_t size() const;
  DistributedSampler sampler() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Returns the message of the exception that is being handled.
LOCKSTEP_EXPORT std::string message_of_current();

/// Converts a batch to named tensors and back.
template <class Batch>
struct Packing {
  static constexpr bool kKnown = false;
};
template <>
struct Packing<at::Tensor> {
  static constexpr bool kKnown = true;
  static std::map<std::string, at::Tensor> tensors(const at::Tensor& batch) { return {{"data", batch}}; }
  static at::Tensor batch(std::map<std::string, at::Tensor> tensors) { return tensors.at("data"); }
};
template <>
struct Packing<torch::data::TensorExample> : Packing<at::Tensor> {};
template <>
struct Packing<torch::data::Example<>> {
  static constexpr bool kKnown = true;
  static std::map<std::string, at::Tensor> tensors(const torch::data::Example<>& batch) {
    std::map<std::string, at::Tensor> tensors{{"data", batch.data}};
    if (batch.target.defined()) tensors.emplace("target", batch.target);
    return tensors;
  }
  static torch::data::Example<> batch(std::map<std::string, at::Tensor> tensors) {
    return {tensors.at("data"), tensors["target"]};
  }
};

/// Makes a batch from samples and serializes it, on the rank that reads.
template <class Collate>
struct Packer {
  Collate collate;

  template <class Sample>
  BatchMessage operator()(std::vector<Sample> samples) {
    using Batch = std::invoke_result_t<Collate&, std::vector<Sample>>;
    const auto count = static_cast<int64_t>(samples.size());
    return {BatchMessage::Kind::kBatch, count, to_safetensors(Packing<Batch>::tensors(collate(std::move(samples))))};
  }
};

}  // namespace detail

/// Reads data on a few ranks and sends the batches to the others. For file systems that cannot serve all ranks:
///
///     auto host = world.new_subgroups(4);   // four ranks on each host
///     lockstep::GroupLoader loader([] { return lockstep::LmdbDataset("/nfs/train.lmdb"); }, sampler,
///                                  {.scatter = host}, {.batch_size = 64});
///     for (auto& batch : loader) train(batch.data, batch.target);
///
/// With `scatter`, rank 0 of the group reads for all ranks of the group. Each rank gets the same batches as from a
/// DataLoader with its sampler. With `broadcast`, all ranks of the group get the same batches, for example because they
/// share one model. With both, the batches are first scattered to rank 0 of each broadcast group, so that one rank
/// reads for all. With neither, every rank reads for itself.
///
/// `open` returns the dataset; it is called only on ranks that read. A reading rank uses a DataLoader with these
/// options for each rank for which it reads. Batches are tensors, or LibTorch's Examples of tensors.
///
/// The constructor and every step of the loop are collective over the groups. Options and samplers, except for the
/// samplers' ranks, must match on all ranks. All ranks must have the same number of batches, which Tail::kExact does
/// not ensure. If any of this does not hold, the constructor throws MismatchError on all ranks. Call set_epoch, save
/// and load of the sampler on every rank, as with a DataLoader. The loop throws MismatchError if a sampler's epoch or
/// position differs from the reader's. If reading fails, all ranks of the groups throw Error in the same step.
///
/// Not thread-safe. Only one loop may run at a time.
template <class Open, class Collate = Stack>
class GroupLoader {
  using Data = std::invoke_result_t<Open&>;
  using Loader = DataLoader<Data, detail::Packer<Collate>>;
  static_assert(std::is_same_v<typename Loader::Batch, detail::BatchMessage>,
                "GroupLoader needs a dataset with get(size_t, at::Generator&) or get(size_t).");

 public:
  using Batch = typename DataLoader<Data, Collate>::Batch;
  using Iterator = BatchIterator<GroupLoader>;
  static_assert(detail::Packing<Batch>::kKnown, "GroupLoader's batches must be tensors or Examples of tensors.");

  GroupLoader(Open open, DistributedSampler sampler, ReadingGroups groups,
              DataLoaderOptions options = {}) requires std::is_same_v<Collate, Stack>
      : GroupLoader(Made(), std::move(open), std::move(sampler), std::move(groups), Stack(), options) {}

  GroupLoader(Open open, DistributedSampler sampler, ReadingGroups groups, Collate collate,
              DataLoaderOptions options = {}) requires(!std::is_same_v<Collate, Stack>)
      : GroupLoader(Made(), std::move(open), std::move(sampler), std::move(groups), std::move(collate), options) {}

  GroupLoader(const GroupLoader&) = delete;
  GroupLoader& operator=(const GroupLoader&) = delete;

  /// Begins the sampler's epoch, or continues it after the sampler's load().
  Iterator begin() {
    batches_.clear();
    waited_ = {};
    return Iterator(this, reading_.begin());
  }
  std::default_sentinel_t end() const { return {}; }

  /// Returns the number of batches in a whole epoch on this rank.
  size_t size() const { return reading_.size(); }

  /// Returns this rank's sampler: a copy, which shares its state with this loader's.
  DistributedSampler sampler() const { return reading_.sampler(); }

  /// Returns the total time that the current or last loop has waited for batches.
  std::chrono::nanoseconds waited() const { return waited_; }

 private:
  friend Iterator;
  struct Made {};

  GroupLoader(Made, Open open, DistributedSampler sampler, ReadingGroups groups, Collate collate,
              const DataLoaderOptions& options)
      : options_(options), reading_(std::move(groups), std::move(sampler), options), samplers_(reading_.samplers()) {
    std::string error;
    if (reading_.reads()) {
      try {
        auto for_readers = options;
        for_readers.device.reset();
        for_readers.pin_memory = false;
        const Data dataset = open();
        for (const auto& each : samplers_)
          loaders_.push_back(std::make_unique<Loader>(dataset, each, detail::Packer<Collate>{collate}, for_readers));
      } catch (...) {
        error = detail::message_of_current();
      }
    }
    reading_.agree(error);
  }

  std::shared_ptr<Batch> next(uint64_t loop) {
    reading_.require_current(loop);
    const auto begin = std::chrono::steady_clock::now();
    auto message = reading_.distribute(read());
    waited_ += std::chrono::steady_clock::now() - begin;
    if (message.kind == detail::BatchMessage::Kind::kEnd) return nullptr;
    auto batch = std::make_shared<Batch>(detail::Packing<Batch>::batch(from_safetensors(message.bytes)));
    detail::pin(*batch, options_);
    detail::place_on(*batch, options_);
    return batch;
  }

  // Returns the next message of each rank for which this rank reads.
  std::vector<detail::BatchMessage> read() {
    std::vector<detail::BatchMessage> messages;
    try {
      if (batches_.empty()) reading_.place(samplers_);
      for (size_t i = 0; i < loaders_.size(); ++i) {
        if (i == batches_.size())
          batches_.push_back(loaders_[i]->begin());
        else
          ++batches_[i];
        messages.push_back(batches_[i] == loaders_[i]->end() ? detail::BatchMessage() : std::move(*batches_[i]));
      }
    } catch (...) {
      messages.assign(loaders_.size(), {detail::BatchMessage::Kind::kError, 0, detail::message_of_current()});
    }
    return messages;
  }

  const DataLoaderOptions options_;
  std::chrono::nanoseconds waited_{0};
  detail::GroupReading reading_;
  std::vector<DistributedSampler> samplers_;
  std::vector<std::unique_ptr<Loader>> loaders_{};
  std::vector<BatchIterator<Loader>> batches_{};  // the current position of each loader
};

template <class Open>
GroupLoader(Open, DistributedSampler, ReadingGroups, DataLoaderOptions) -> GroupLoader<Open>;
template <class Open>
GroupLoader(Open, DistributedSampler, ReadingGroups) -> GroupLoader<Open>;

}  // namespace lockstep
