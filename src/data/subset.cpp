#include <lockstep/subset.h>

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <string>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {
namespace detail {
namespace {

void check_kinds(const std::vector<PartSize>& sizes) {
  if (sizes.empty()) throw UsageError("random_split: there are no sizes, expected one for each part");
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i].is_fraction() != sizes[0].is_fraction())
      throw UsageError(text("random_split: size ", i, " is a ",
                            sizes[i].is_fraction() ? "fraction" : "number of samples", " and size 0 is a ",
                            sizes[0].is_fraction() ? "fraction" : "number of samples",
                            "; pass integers only, or fractions such as 0.9 only"));
    if (!sizes[i].is_fraction() && sizes[i].samples() < 0)
      throw UsageError(text("random_split: size ", i, " is ", sizes[i].samples(), ", expected 0 or more"));
    if (sizes[i].is_fraction() && !(sizes[i].fraction() >= 0 && sizes[i].fraction() <= 1))
      throw UsageError(text("random_split: fraction ", i, " is ", sizes[i].fraction(), ", expected 0 to 1"));
  }
}

std::vector<size_t> samples_of_parts(size_t dataset_size, const std::vector<PartSize>& sizes) {
  std::vector<size_t> counts;
  size_t left = dataset_size;
  const auto refusal = [&] {
    std::string listed;
    for (const auto& size : sizes) listed += text(listed.empty() ? "" : " + ", size.samples());
    return UsageError(text("random_split: the sizes ", listed, " do not add up to ", dataset_size,
                           ", the number of samples in the dataset; change one of them, or pass fractions"));
  };
  for (const auto& size : sizes) {
    counts.push_back(static_cast<size_t>(size.samples()));
    if (counts.back() > left) throw refusal();
    left -= counts.back();
  }
  if (left > 0) throw refusal();
  return counts;
}

std::vector<size_t> samples_of_fractions(size_t dataset_size, const std::vector<PartSize>& sizes) {
  double sum = 0;
  for (const auto& size : sizes) sum += size.fraction();
  if (std::abs(sum - 1) > 1e-9)
    throw UsageError(
        text("random_split: the fractions add up to ", std::setprecision(12), sum, ", expected 1; change one of them"));
  std::vector<size_t> counts;
  size_t left = dataset_size;
  for (const auto& size : sizes) {
    const double samples = std::floor(static_cast<double>(dataset_size) * size.fraction());
    counts.push_back(std::min(left, static_cast<size_t>(samples)));
    left -= counts.back();
  }
  for (size_t i = 0; left > 0; ++i, --left) ++counts[i % counts.size()];
  return counts;
}

}  // namespace

void check_subset(const std::vector<size_t>& indices, std::optional<size_t> dataset_size) {
  if (!dataset_size) return;
  for (size_t i = 0; i < indices.size(); ++i)
    if (indices[i] >= *dataset_size)
      throw UsageError(text("Subset: index ", i, " is sample ", indices[i], ", but the dataset has ", *dataset_size,
                            " samples; pass indices below that number"));
}

void refuse_sample_of_subset(size_t index, size_t size) {
  throw UsageError(text("Subset: sample ", index, " is out of range: the subset has ", size,
                        " samples; make the sampler for the subset, not for the whole dataset"));
}

void refuse_split_of_unknown_size() {
  throw UsageError("random_split: the dataset does not know its size; give it a function size()");
}

std::vector<std::vector<size_t>> split_indices(size_t dataset_size, const std::vector<PartSize>& sizes,
                                               const RandomSplitOptions& options) {
  check_kinds(sizes);
  const auto counts =
      sizes[0].is_fraction() ? samples_of_fractions(dataset_size, sizes) : samples_of_parts(dataset_size, sizes);
  const auto random = at::detail::createCPUGenerator(options.seed);
  const at::Tensor order = at::randperm(static_cast<int64_t>(dataset_size), random, at::kLong);
  const int64_t* next = order.data_ptr<int64_t>();
  std::vector<std::vector<size_t>> parts;
  for (const size_t count : counts) {
    parts.emplace_back(next, next + count);
    next += count;
  }
  return parts;
}

}  // namespace detail
}  // namespace lockstep
