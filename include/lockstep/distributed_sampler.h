#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <torch/data/samplers/base.h>

#include <lockstep/export.h>

namespace lockstep {

class ProcessGroup;

/// What happens to the samples that do not divide evenly among the ranks.
enum class Tail {
  kPad,   ///< Repeat samples from the start, so that every rank gets ceil(n / ranks). Python's default.
  kDrop,  ///< Leave the last n % ranks samples of the order out. Python's drop_last=True.
  kExact  ///< No sample twice, none left out: ranks differ by at most one sample. For evaluation.
};

struct DistributedSamplerOptions {
  bool shuffle = true;
  uint64_t seed = 0;  ///< The same on every rank.
  Tail tail = Tail::kPad;
};

/// The samples of one rank in one epoch, index for index those of torch.utils.data.DistributedSampler in Python (kExact
/// has no counterpart there). Pure. Expects 0 <= rank < num_replicas; an empty list where there is nothing for the
/// rank.
LOCKSTEP_EXPORT std::vector<size_t> distributed_indices(size_t dataset_size, int rank, int num_replicas,
                                                        const DistributedSamplerOptions& options, int64_t epoch);

/// A dataset whose size() converts to a number of samples or, as LibTorch's, to an optional one.
template <class Data>
concept SizedDataset = requires(const Data& data) {
  { data.size() } -> std::convertible_to<torch::optional<size_t>>;
};

/// Deals the samples of a dataset out to the ranks of a group. Local: it never communicates, every rank computes the
/// same order from the same options.
///
/// Copies share one state: a loader keeps its own copy, and set_epoch() on the original reaches it at its next reset().
/// So let one sampler drive one loader at a time. Thread-safe: every method locks the shared state.
///
/// Works with torch::data::make_data_loader, which calls reset() when a loop over it begins. Throws UsageError for an
/// empty dataset, for a rank outside the replicas and, with Tail::kDrop, for fewer samples than replicas.
class LOCKSTEP_EXPORT DistributedSampler : public torch::data::samplers::Sampler<std::vector<size_t>> {
 public:
  DistributedSampler(size_t dataset_size, int rank, int num_replicas, DistributedSamplerOptions options = {});
  DistributedSampler(size_t dataset_size, const ProcessGroup& group, DistributedSamplerOptions options = {});
  template <SizedDataset Data>
  DistributedSampler(const Data& dataset, const ProcessGroup& group, DistributedSamplerOptions options = {})
      : DistributedSampler(known_size(dataset.size()), group, options) {}
  ~DistributedSampler() override;
  DistributedSampler(const DistributedSampler&) = default;
  DistributedSampler& operator=(const DistributedSampler&) = default;

  /// Chooses the order of the next reset(); what is being dealt out now stays as it is. Call it before each epoch, with
  /// the same number on every rank: without it every epoch has the same order, and the second one logs a warning.
  void set_epoch(int64_t epoch);
  int64_t epoch() const;

  /// With which epoch training goes on after load(): epoch() or, if all of it had been dealt out, the one after.
  int64_t next_epoch() const;

  /// How many samples this rank gets in an epoch.
  size_t size() const;

  /// How many of them next() has dealt out in the epoch that reset() began.
  size_t position() const;

  /// How many samples all ranks share.
  size_t dataset_size() const;

  int rank() const { return rank_; }
  int num_replicas() const { return num_replicas_; }
  const DistributedSamplerOptions& options() const { return options_; }

  /// All samples of this rank in epoch(), whatever has been dealt out already.
  std::vector<size_t> indices() const;

  /// Starts epoch() from its first sample, or, directly after load(), from the loaded position. With `new_size` the
  /// dataset has that many samples from now on.
  void reset(torch::optional<size_t> new_size = torch::nullopt) override;

  /// The next samples: `batch_size` of them, fewer at the end, then nullopt until reset().
  torch::optional<std::vector<size_t>> next(size_t batch_size) override;

  /// Writes the epoch and how far next() has come in it. lockstep's DataLoader calls next() as the training loop goes
  /// on; LibTorch's, which prefetches, is ahead of the loop.
  void save(torch::serialize::OutputArchive& archive) const override;

  /// Continues where the saved sampler was. set_epoch() with another epoch discards the position. All ranks may load
  /// what one of them saved. Throws UsageError, and changes nothing, if the dataset has another size or if the position
  /// is inside an epoch that was dealt out by other options or to another number of replicas.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct State;
  static size_t known_size(torch::optional<size_t> size);
  std::vector<size_t> deal(size_t dataset_size, int64_t epoch) const;

  // Constant after construction.
  int rank_;
  int num_replicas_;
  DistributedSamplerOptions options_;
  std::shared_ptr<State> state_;  // The pointer is constant; what it points to is guarded by State::mutex.
};

}  // namespace lockstep
