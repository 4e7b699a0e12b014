#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/export.h>

namespace lockstep {

/// The order in which an epoch visits samples of a dataset, over all ranks. A DistributedSampler divides it between the
/// ranks: of N ranks, rank r gets the elements r, r + N, r + 2N, ... So a step of all ranks together takes the next
/// N * batch_size elements, and a sampler with an order saves and loads its position like one without.
///
///     lockstep::DistributedSampler sampler(lockstep::weighted_order(weights, {.seed = 1}), dataset, world);
///
/// For an order of your own, pass a function of the epoch:
///
///     lockstep::SampleOrder order("easy samples first", [=](int64_t epoch) { return easiest(1000 * (epoch + 1)); });
///
/// Thread-safe if the function is. Cheap to copy.
class LOCKSTEP_EXPORT SampleOrder {
 public:
  /// Returns indices of samples. A sample may occur several times, or not at all. A pure function: it must return the
  /// same indices on every rank, and each time it is called, also after a resume.
  using Indices = std::function<std::vector<size_t>(int64_t epoch)>;

  /// `name` identifies the order in saved states: a position inside an epoch is loaded only by a sampler whose order
  /// has the same name. Throws UsageError if it is empty.
  SampleOrder(std::string name, Indices indices);

  const std::string& name() const { return name_; }
  std::vector<size_t> operator()(int64_t epoch) const { return indices_(epoch); }

 private:
  std::string name_;
  Indices indices_;
};

struct DrawOptions {
  /// Samples in an epoch, over all ranks. Default: as many as the dataset has.
  std::optional<size_t> num_samples{};
  /// Whether a sample may be drawn several times. Without replacement and with more samples than the dataset has, the
  /// dataset is repeated.
  bool replacement = true;
  uint64_t seed = 0;
};

/// Draws samples with equal probability. The indices of an epoch are those of Python's RandomSampler with a generator
/// that was seeded with `seed` + epoch. Throws UsageError for an empty dataset and for 0 samples.
LOCKSTEP_EXPORT SampleOrder random_order(size_t dataset_size, const DrawOptions& options = {});

/// Draws samples with probabilities in proportion to their weights, for example to balance rare classes. The indices of
/// an epoch are those of Python's WeightedRandomSampler with a generator that was seeded with `seed` + epoch. Throws
/// UsageError for weights that are empty, negative, not finite or all zero, and, without replacement, if fewer samples
/// have a weight than are drawn.
LOCKSTEP_EXPORT SampleOrder weighted_order(const std::vector<double>& weights, const DrawOptions& options = {});

/// The weight of each sample with which all classes are drawn equally often: 1 / the number of samples of its class.
LOCKSTEP_EXPORT std::vector<double> balancing_weights(const at::Tensor& classes);

struct SubsetOptions {
  bool shuffle = true;
  uint64_t seed = 0;
};

/// Visits some samples of a dataset, for example the part that is used for training. Shuffled as by Python's
/// SubsetRandomSampler with a generator that was seeded with `seed` + epoch. Throws UsageError if it is empty.
LOCKSTEP_EXPORT SampleOrder subset_order(std::vector<size_t> samples, const SubsetOptions& options = {});

struct SimilarLengthOptions {
  /// Samples in a step, over all ranks: the loader's batch_size times the number of ranks.
  int64_t samples_per_step = 0;
  /// In how many steps' samples similar ones are searched. More steps: more similar, but less random.
  size_t window_steps = 50;
  uint64_t seed = 0;
};

/// Visits every sample once, in steps whose samples have similar lengths, so that batches need little padding and all
/// ranks have equal work in a step. The samples are shuffled, sorted by length inside of windows, divided into steps,
/// and the steps are shuffled; the last step of the epoch is the smaller one, if there is one. Throws UsageError for
/// options or lengths that are 0 or less.
LOCKSTEP_EXPORT SampleOrder similar_length_order(std::vector<int64_t> lengths, const SimilarLengthOptions& options);

}  // namespace lockstep
