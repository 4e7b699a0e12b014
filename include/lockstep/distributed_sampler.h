#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <torch/data/samplers/base.h>

#include <lockstep/export.h>
#include <lockstep/sample_order.h>

namespace lockstep {

class ProcessGroup;

namespace detail {
class LoaderCore;
}

/// How to handle a dataset size that is not a multiple of the number of ranks.
enum class Tail {
  kPad,   ///< Repeat samples from the start: every rank gets ceil(n / ranks). Default of Python's DistributedSampler.
  kDrop,  ///< Drop the last n % ranks samples of the shuffled order. Python's drop_last=True.
  kExact  ///< Each sample exactly once: ranks differ by at most one sample. For evaluation.
};

struct DistributedSamplerOptions {
  bool shuffle = true;
  uint64_t seed = 0;  ///< Must be the same on every rank.
  Tail tail = Tail::kPad;
};

/// Returns the samples of one rank in one epoch. The indices are equal to those of torch.utils.data.DistributedSampler
/// in Python; kExact has no counterpart there. A pure function. Requires 0 <= rank < num_replicas. The result may be
/// empty.
LOCKSTEP_EXPORT std::vector<size_t> distributed_indices(size_t dataset_size, int rank, int num_replicas,
                                                        const DistributedSamplerOptions& options, int64_t epoch);

/// A dataset whose size() converts to a number of samples, or to an optional number as in LibTorch.
template <class Data>
concept SizedDataset = requires(const Data& data) {
  { data.size() } -> std::convertible_to<torch::optional<size_t>>;
};

/// Partitions the samples of a dataset among the ranks of a group. Not collective: every rank computes the same order
/// from the same options.
///
/// Copies share one state. A loader keeps a copy, and set_epoch() on the original takes effect at the loader's next
/// reset(). So use one sampler for one loader at a time. Thread-safe: every method locks the shared state.
///
/// By default each epoch visits every sample once, shuffled or in order. A SampleOrder visits samples in any other way:
/// weighted, with replacement, sorted by length, or as you like.
///
/// Works with torch::data::make_data_loader, which calls reset() at the beginning of each loop. The constructor throws
/// UsageError for an empty dataset, for a dataset of unknown size, for a rank outside of 0 to num_replicas - 1 and,
/// with Tail::kDrop, for fewer samples than replicas.
class LOCKSTEP_EXPORT DistributedSampler : public torch::data::samplers::Sampler<std::vector<size_t>> {
 public:
  DistributedSampler(size_t dataset_size, int rank, int num_replicas, DistributedSamplerOptions options = {});
  DistributedSampler(size_t dataset_size, const ProcessGroup& group, DistributedSamplerOptions options = {});
  template <SizedDataset Data>
  DistributedSampler(const Data& dataset, const ProcessGroup& group, DistributedSamplerOptions options = {})
      : DistributedSampler(known_size(dataset.size()), group, options) {}
  /// With an order, `shuffle` is ignored, and `seed` is that of the samples' random numbers (see DataLoader).
  DistributedSampler(SampleOrder order, size_t dataset_size, int rank, int num_replicas,
                     DistributedSamplerOptions options = {});
  DistributedSampler(SampleOrder order, size_t dataset_size, const ProcessGroup& group,
                     DistributedSamplerOptions options = {});
  template <SizedDataset Data>
  DistributedSampler(SampleOrder order, const Data& dataset, const ProcessGroup& group,
                     DistributedSamplerOptions options = {})
      : DistributedSampler(std::move(order), known_size(dataset.size()), group, options) {}
  ~DistributedSampler() override;
  DistributedSampler(const DistributedSampler&) = default;
  DistributedSampler& operator=(const DistributedSampler&) = default;

  /// Sets the epoch, and therefore the order of samples, that the next reset() starts. Does not affect the current
  /// order. Call it before each epoch with the same number on every rank. Without it every shuffled epoch has the same
  /// order; rank 0 logs a warning in the second epoch. Throws UsageError for a negative epoch.
  void set_epoch(int64_t epoch);
  int64_t epoch() const;

  /// Returns the epoch with which to continue after load(): epoch(), or epoch() + 1 if epoch() is complete.
  int64_t next_epoch() const;

  /// Returns the number of samples that this rank gets in an epoch. In an epoch that load() continues with another
  /// number of replicas, the number that it gets in the rest of the epoch.
  size_t size() const;

  /// Returns how many of size() samples next() has returned.
  size_t position() const;

  /// Returns the number of samples in the dataset.
  size_t dataset_size() const;

  int rank() const { return rank_; }
  int num_replicas() const { return num_replicas_; }
  const DistributedSamplerOptions& options() const { return options_; }
  /// Returns the order that was passed to the constructor.
  const std::optional<SampleOrder>& order() const { return order_; }

  /// Returns a sampler for another rank, with the same dataset, order and options, at the beginning of epoch 0.
  DistributedSampler for_rank(int rank) const;

  /// Returns all samples of this rank in epoch(), regardless of the position.
  std::vector<size_t> indices() const;

  /// Starts epoch() from its first sample or, directly after load(), from the loaded position. `new_size` changes the
  /// number of samples in the dataset; with an order it must not. Throws UsageError if the order has no samples, or one
  /// that the dataset does not have.
  void reset(torch::optional<size_t> new_size = torch::nullopt) override;

  /// Returns the next `batch_size` samples, fewer at the end of the epoch, then nullopt until reset().
  torch::optional<std::vector<size_t>> next(size_t batch_size) override;

  /// Writes the epoch and the position. lockstep's DataLoader advances the position with the training loop. LibTorch's
  /// loader prefetches, so its position is ahead of the loop.
  void save(torch::serialize::OutputArchive& archive) const override;

  /// Continues at the saved epoch and position. A later set_epoch() with a different epoch discards the position. All
  /// ranks may load the state that one of them saved. If the number of replicas differs, the replicas divide the
  /// samples of the epoch that none of the saved replicas had taken: each sample is seen once in the epoch, except that
  /// kPad repeats and kDrop drops some at its end. Throws UsageError, and changes nothing, if the dataset size differs,
  /// or if the saved position is inside an epoch with a different order, seed, shuffle or tail.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  friend class detail::LoaderCore;
  struct State;
  DistributedSampler(std::optional<SampleOrder> order, size_t dataset_size, int rank, int num_replicas,
                     const DistributedSamplerOptions& options);
  static size_t known_size(torch::optional<size_t> size);
  /// Begins the next epoch if this one is complete, unless set_epoch() was called.
  void advance_epoch();
  size_t samples_in(int64_t epoch, size_t dataset_size) const;
  std::vector<size_t> indices_of_rank(size_t start, size_t dataset_size, int64_t epoch) const;

  // Constant after construction.
  int rank_;
  int num_replicas_;
  DistributedSamplerOptions options_;
  std::optional<SampleOrder> order_;
  std::shared_ptr<State> state_;  // The pointer is constant. State::mutex guards the object.
};

}  // namespace lockstep
