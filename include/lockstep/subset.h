#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include <c10/util/ArrayRef.h>

#include <lockstep/data_loader.h>
#include <lockstep/distributed_sampler.h>
#include <lockstep/export.h>

namespace lockstep {

/// The size of a part in random_split: a number of samples if it is an integer, else a fraction of the dataset.
class LOCKSTEP_EXPORT PartSize {
 public:
  template <std::integral Number>
  PartSize(Number samples) : value_(static_cast<int64_t>(samples)) {}
  template <std::floating_point Number>
  PartSize(Number fraction) : value_(static_cast<double>(fraction)) {}

  bool is_fraction() const { return value_.index() == 1; }
  /// Requires !is_fraction().
  int64_t samples() const { return std::get<int64_t>(value_); }
  /// Requires is_fraction().
  double fraction() const { return std::get<double>(value_); }

 private:
  std::variant<int64_t, double> value_;
};

struct RandomSplitOptions {
  uint64_t seed = 0;  ///< Must be the same on every rank.
};

namespace detail {

/// Throws UsageError for an index that the dataset does not have, if its size is known.
LOCKSTEP_EXPORT void check_subset(const std::vector<size_t>& indices, std::optional<size_t> dataset_size);
[[noreturn]] LOCKSTEP_EXPORT void refuse_sample_of_subset(size_t index, size_t size);
[[noreturn]] LOCKSTEP_EXPORT void refuse_split_of_unknown_size();
/// Returns the indices of each part. A pure function.
LOCKSTEP_EXPORT std::vector<std::vector<size_t>> split_indices(size_t dataset_size, const std::vector<PartSize>& sizes,
                                                               const RandomSplitOptions& options);

/// The size of a dataset, or of the dataset that a shared pointer points to.
template <class Data>
std::optional<size_t> size_of_dataset(Data& data) {
  if constexpr (SizedDataset<DatasetIn<Data>>) {
    const torch::optional<size_t> size = dataset_in(data).size();
    if (size.has_value()) return *size;
  }
  return std::nullopt;
}

}  // namespace detail

/// Some samples of a dataset, in the order of `indices`. An index may occur several times. Itself a dataset: sample i
/// of the subset is sample indices[i] of the dataset, so a DistributedSampler without shuffling and with Tail::kExact
/// delivers each of them once, and in this order over all ranks together.
///
///     lockstep::Subset kept(dataset, indices);
///     lockstep::DistributedSampler sampler(kept, world, {.shuffle = false, .tail = lockstep::Tail::kExact});
///     lockstep::DataLoader loader(kept, sampler, {.batch_size = 64});
///
/// Has the functions of the dataset that a DataLoader calls: `get` (also with a generator), `gather` and `get_batch`.
/// The generator of a sample is seeded by its index in the subset. Holds a copy of the dataset; with a std::shared_ptr,
/// subsets and workers share the object. Copies share the indices. As thread-safe as the dataset.
///
/// torch::data::make_data_loader takes no Subset: use the dataset with a DistributedSampler of subset_order(indices()).
template <class Data>
class Subset {
  using Dataset = detail::DatasetIn<Data>;

 public:
  /// Throws UsageError for an index that the dataset does not have, if the dataset knows its size.
  Subset(Data dataset, std::vector<size_t> indices) : dataset_(std::move(dataset)) {
    detail::check_subset(indices, detail::size_of_dataset(dataset_));
    indices_ = std::make_shared<const std::vector<size_t>>(std::move(indices));
  }

  size_t size() const { return indices_->size(); }
  const std::vector<size_t>& indices() const { return *indices_; }
  /// Returns the dataset, or the shared pointer to it.
  const Data& dataset() const { return dataset_; }

  // Each throws UsageError for an index of size() or more.

  auto get(size_t index) requires detail::ReadsSamples<Dataset> {
    return detail::dataset_in(dataset_).get(index_of(index));
  }
  auto get(size_t index, at::Generator& random) requires detail::ReadsWithGenerator<Dataset> {
    return detail::dataset_in(dataset_).get(index_of(index), random);
  }
  auto gather(c10::ArrayRef<size_t> samples) requires detail::Gathers<Dataset> {
    const auto indices = indices_of(samples);
    return detail::dataset_in(dataset_).gather(indices);
  }
  auto get_batch(c10::ArrayRef<size_t> samples) requires detail::ReadsBatches<Dataset> {
    const auto indices = indices_of(samples);
    return detail::dataset_in(dataset_).get_batch(indices);
  }

 private:
  size_t index_of(size_t index) const {
    if (index >= size()) detail::refuse_sample_of_subset(index, size());
    return (*indices_)[index];
  }
  std::vector<size_t> indices_of(c10::ArrayRef<size_t> samples) const {
    std::vector<size_t> indices;
    indices.reserve(samples.size());
    for (const size_t sample : samples) indices.push_back(index_of(sample));
    return indices;
  }

  Data dataset_;
  std::shared_ptr<const std::vector<size_t>> indices_{};  // Constant after construction.
};

/// Divides a dataset at random into parts that do not overlap, for example for training and validation:
///
///     auto parts = lockstep::random_split(dataset, {0.9, 0.1}, {.seed = 1});
///
/// `sizes` are numbers of samples, which must add up to the size of the dataset, or fractions, which must add up to 1.
/// A fraction is rounded down to whole samples; the samples that are left go to the parts in turn, from the first on. A
/// part may be empty.
///
/// Not collective. The split depends on the size of the dataset, the sizes and the seed only: it is the same on every
/// rank and for any number of ranks. The indices are those of Python's torch.utils.data.random_split with a generator
/// that was seeded with `seed`. Each part holds a copy of the dataset; pass a std::shared_ptr if copies are expensive.
///
/// Throws UsageError for sizes that do not add up, that are negative, not finite, or of both kinds, and if the dataset
/// does not know its size.
template <class Data>
std::vector<Subset<Data>> random_split(Data dataset, const std::vector<PartSize>& sizes,
                                       const RandomSplitOptions& options = {}) {
  const auto size = detail::size_of_dataset(dataset);
  if (!size) detail::refuse_split_of_unknown_size();
  std::vector<Subset<Data>> parts;
  for (auto& indices : detail::split_indices(*size, sizes, options)) parts.emplace_back(dataset, std::move(indices));
  return parts;
}

}  // namespace lockstep
