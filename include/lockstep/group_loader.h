#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <lockstep/batch_iterator.h>
#include <lockstep/batch_traits.h>
#include <lockstep/collate.h>
#include <lockstep/data_loader.h>
#include <lockstep/detail/dataset_reading.h>
#include <lockstep/detail/group_reading.h>
#include <lockstep/detail/loaded_batch.h>
#include <lockstep/distributed_sampler.h>
#include <lockstep/process_group.h>

namespace lockstep {

/// Which ranks read, and for which other ranks. A group that does not contain this rank is ignored. The groups must
/// support CPU tensors.
struct ReadingGroups {
  /// Rank 0 of this group reads for all its ranks. Each rank gets the batches of its own sampler.
  std::optional<ProcessGroup> scatter{};
  /// Rank 0 of this group sends its batches to all its ranks. Their samplers must be equal.
  std::optional<ProcessGroup> broadcast{};
};

/// Reads data on a few ranks and sends the batches to the other ranks. For file systems that cannot serve all ranks:
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
/// options for each rank for which it reads. Batches of all types can be sent for which BatchTraits is defined:
/// tensors, numbers, strings, LibTorch's Examples, containers of these, and structs that list their members.
///
/// The constructor and every step of the loop are collective over the groups. Options and samplers, except for the
/// samplers' ranks, must match on all ranks. All ranks must have the same number of batches, which Tail::kExact does
/// not ensure. If any of this does not hold, the constructor throws MismatchError on all ranks. Call set_epoch, save
/// and load of the sampler on every rank, as with a DataLoader. The loop throws MismatchError if a sampler's epoch or
/// position differs from the reader's.
///
/// If the constructor, begin() or a step fails on any rank, all ranks throw in that same call: an error of the same
/// kind, with the same message, which begins with the failing rank in the job. Error::rank() is that rank. If several
/// ranks fail, the lowest of them is reported. Failures are all exceptions of the dataset, of the collate function, of
/// BatchTraits, of allocations and of the copy to the device, on readers and on receivers. Exceptions that are not
/// lockstep's become Error; on the failing rank they are nested in it. No rank has received the batch of a step that
/// failed, and the samplers still point to it. The loop is then over on all ranks. The groups still work, and a new
/// loop may begin. Not included: a rank that dies or leaves the loop alone (PeerError or TimeoutError of the group),
/// and errors of a GPU that CUDA reports after an asynchronous copy.
///
/// Not thread-safe. Only one loop may run at a time: when a second loop has begun, a step of the first throws
/// UsageError. The second loop continues if all ranks made that step, otherwise it ends on all of them.
template <class Open, class Collate = Stack>
class GroupLoader {
  using Data = std::invoke_result_t<Open&>;
  using Loader = DataLoader<Data, detail::Packer<Collate>>;
  // A custom collate function, such as the Packer, receives individual samples: Dataset::gather is not called.
  using Samples = detail::SamplesOf<detail::DatasetIn<Data>, detail::Packer<Collate>>;

 public:
  using Batch = typename detail::Collated<Samples, Collate>::Batch;
  using Iterator = BatchIterator<GroupLoader>;
  static_assert(Sendable<Batch>,
                "GroupLoader cannot send batches of this type: specialize lockstep::BatchTraits for it "
                "(lockstep/batch_traits.h).");
  static_assert(std::is_same_v<typename Loader::Batch, detail::BatchMessage>,
                "GroupLoader needs a dataset with get(size_t, at::Generator&) or get(size_t).");

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
    return Iterator(this, reading_.begin());
  }
  std::default_sentinel_t end() const { return {}; }

  /// Returns the number of batches in a whole epoch on this rank.
  int64_t size() const { return static_cast<int64_t>(reading_.size()); }

  /// Returns this rank's sampler: a copy, which shares its state with this loader's.
  DistributedSampler sampler() const { return reading_.sampler(); }

  /// Returns the total time that the current or last loop has waited for batches.
  std::chrono::nanoseconds waited() const { return reading_.waited(); }

 private:
  friend Iterator;
  struct Made {};
  using Loaded = detail::LoadedBatch<Batch>;

  GroupLoader(Made, Open open, DistributedSampler sampler, ReadingGroups groups, Collate collate,
              const DataLoaderOptions& options);
  std::shared_ptr<Batch> next(uint64_t loop);
  std::vector<detail::BatchMessage> read();  // the next message of each rank for which this rank reads

  const DataLoaderOptions options_;
  const detail::DeviceCopies copies_;
  detail::GroupReading reading_;
  std::vector<DistributedSampler> samplers_{};
  std::vector<std::unique_ptr<Loader>> loaders_{};
  std::vector<BatchIterator<Loader>> batches_{};  // the current position of each loader
};

template <class Open>
GroupLoader(Open, DistributedSampler, ReadingGroups, DataLoaderOptions) -> GroupLoader<Open>;
template <class Open>
GroupLoader(Open, DistributedSampler, ReadingGroups) -> GroupLoader<Open>;

}  // namespace lockstep

#include <lockstep/detail/group_loader_inl.h>
