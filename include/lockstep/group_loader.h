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

/// Who reads, and for whom. A group that this rank is not in counts as none. Groups must move CPU tensors.
struct ReadingGroups {
  /// Its rank 0 reads for all its ranks, and each gets the batches of its own sampler.
  std::optional<ProcessGroup> scatter{};
  /// Its rank 0 hands its batches to all its ranks, which have equal samplers.
  std::optional<ProcessGroup> broadcast{};
};

namespace detail {

/// A batch on its way: safetensors, or what went wrong.
struct Parcel {
  enum class Kind : int64_t { kEnd, kBatch, kError };
  Kind kind = Kind::kEnd;
  int64_t samples = 0;
  std::string bytes{};
};

/// What a GroupLoader does whatever its samples are: knows for whom this rank reads, and hands parcels over.
class LOCKSTEP_EXPORT GroupReading {
 public:
  GroupReading(ReadingGroups groups, DistributedSampler sampler, const DataLoaderOptions& options);
  ~GroupReading();

  bool reads() const;
  std::vector<DistributedSampler> samplers() const;  // of those for whom this rank reads
  void agree(const std::string& error) const;        // throws on all ranks where a reader has one

  uint64_t begin();                                             // the number of the loop that begins
  void place(std::vector<DistributedSampler>& samplers) const;  // where this rank's is
  void require_current(uint64_t loop) const;
  /// This rank's parcel, of one for each rank for which this rank reads.
  Parcel exchange(std::vector<Parcel> parcels);
  size_t size() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// What the exception that is being handled says.
LOCKSTEP_EXPORT std::string message_of_current();

/// A batch as named tensors, and back.
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

/// Makes a batch of samples and packs it, where it is read.
template <class Collate>
struct Packer {
  Collate collate;

  template <class Sample>
  Parcel operator()(std::vector<Sample> samples) {
    using Batch = std::invoke_result_t<Collate&, std::vector<Sample>>;
    const auto count = static_cast<int64_t>(samples.size());
    return {Parcel::Kind::kBatch, count, to_safetensors(Packing<Batch>::tensors(collate(std::move(samples))))};
  }
};

}  // namespace detail

/// Reads on few ranks and hands batches to the others, where all of them reading would be too much for a file system:
///
///     auto host = world.new_subgroups(4);   // four ranks on each host
///     lockstep::GroupLoader loader([] { return lockstep::LmdbDataset("/nfs/train.lmdb"); }, sampler,
///                                  {.scatter = host}, {.batch_size = 64});
///     for (auto& batch : loader) train(batch.data, batch.target);
///
/// With `scatter` the group's rank 0 reads for all of its ranks, which get what a DataLoader with their sampler would
/// give them. With `broadcast` all ranks of the group get the same batches, as those do that share a model among them.
/// With both, the batches are scattered over the rank 0 of each broadcasting group first: one rank reads for all. With
/// neither every rank reads for itself.
///
/// `open` returns the dataset, and is called on the ranks that read alone; the options are those of a DataLoader there,
/// for each rank that it reads for. Batches are made of tensors, or of LibTorch's Examples of tensors.
///
/// Constructing it, and every step of its loop, is collective in its groups. Options and samplers must be the same on
/// all ranks but for the samplers' ranks, else all throw MismatchError; every rank needs as many batches, so that
/// Tail::kExact is refused where they would not be. What goes wrong where it is read, all ranks of the groups throw as
/// Error in the same step. Samplers are set, saved and loaded on every rank, as with a DataLoader.
template <class Open, class Collate = Stack>
class GroupLoader {
  using Data = std::invoke_result_t<Open&>;
  using Loader = DataLoader<Data, detail::Packer<Collate>>;
  static_assert(std::is_same_v<typename Loader::Batch, detail::Parcel>,
                "GroupLoader reads datasets sample by sample: get(size_t, at::Generator&) or get(size_t).");

 public:
  using Batch = typename DataLoader<Data, Collate>::Batch;
  using Iterator = BatchIterator<GroupLoader>;
  static_assert(detail::Packing<Batch>::kKnown, "GroupLoader moves tensors, and LibTorch's Examples of tensors.");

  GroupLoader(Open open, DistributedSampler sampler, ReadingGroups groups,
              DataLoaderOptions options = {}) requires std::is_same_v<Collate, Stack>
      : GroupLoader(Made(), std::move(open), std::move(sampler), std::move(groups), Stack(), options) {}

  GroupLoader(Open open, DistributedSampler sampler, ReadingGroups groups, Collate collate,
              DataLoaderOptions options = {}) requires(!std::is_same_v<Collate, Stack>)
      : GroupLoader(Made(), std::move(open), std::move(sampler), std::move(groups), std::move(collate), options) {}

  GroupLoader(const GroupLoader&) = delete;
  GroupLoader& operator=(const GroupLoader&) = delete;

  /// Begins the sampler's epoch or, after its load(), continues it.
  Iterator begin() {
    batches_.clear();
    waited_ = {};
    return Iterator(this, reading_.begin());
  }
  std::default_sentinel_t end() const { return {}; }

  /// How many batches a whole epoch has on this rank.
  size_t size() const { return reading_.size(); }

  /// How long this loop, or the last, has waited for batches in all.
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
    auto parcel = reading_.exchange(read());
    waited_ += std::chrono::steady_clock::now() - begin;
    if (parcel.kind == detail::Parcel::Kind::kEnd) return nullptr;
    auto batch = std::make_shared<Batch>(detail::Packing<Batch>::batch(from_safetensors(parcel.bytes)));
    detail::pin(*batch, options_);
    detail::place_on(*batch, options_);
    return batch;
  }

  // The next parcel of each rank that this one reads for.
  std::vector<detail::Parcel> read() {
    std::vector<detail::Parcel> parcels;
    try {
      if (batches_.empty()) reading_.place(samplers_);
      for (size_t i = 0; i < loaders_.size(); ++i) {
        if (i == batches_.size())
          batches_.push_back(loaders_[i]->begin());
        else
          ++batches_[i];
        parcels.push_back(batches_[i] == loaders_[i]->end() ? detail::Parcel() : std::move(*batches_[i]));
      }
    } catch (...) {
      parcels.assign(loaders_.size(), {detail::Parcel::Kind::kError, 0, detail::message_of_current()});
    }
    return parcels;
  }

  const DataLoaderOptions options_;
  std::chrono::nanoseconds waited_{0};
  detail::GroupReading reading_;
  std::vector<DistributedSampler> samplers_;
  std::vector<std::unique_ptr<Loader>> loaders_{};
  std::vector<BatchIterator<Loader>> batches_{};  // where each of them is
};

template <class Open>
GroupLoader(Open, DistributedSampler, ReadingGroups, DataLoaderOptions) -> GroupLoader<Open>;
template <class Open>
GroupLoader(Open, DistributedSampler, ReadingGroups) -> GroupLoader<Open>;

}  // namespace lockstep
