#include <lockstep/sample_order.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <lockstep/error.h>

#include "base/mix_bits.h"
#include "base/text.h"

namespace lockstep {
namespace {

at::Generator generator_of(uint64_t seed, int64_t epoch) {
  return at::detail::createCPUGenerator(seed + static_cast<uint64_t>(epoch));
}

void append(std::vector<size_t>& indices, const at::Tensor& numbers) {
  const int64_t* begin = numbers.data_ptr<int64_t>();
  indices.insert(indices.end(), begin, begin + numbers.numel());
}

at::Tensor permutation(size_t size, const at::Generator& random) {
  return at::randperm(static_cast<int64_t>(size), random, at::kLong);
}

/// Moves the elements into a random order.
template <class T>
void shuffle(std::vector<T>& elements, const at::Generator& random) {
  std::vector<size_t> order;
  append(order, permutation(elements.size(), random));
  std::vector<T> shuffled;
  shuffled.reserve(elements.size());
  for (size_t index : order) shuffled.push_back(std::move(elements[index]));
  elements = std::move(shuffled);
}

/// A hash of the values, for the names of orders.
template <class T>
std::string digest_of(const std::vector<T>& values) {
  uint64_t digest = mix_bits(values.size());
  for (const T& value : values) {
    uint64_t bits = 0;
    static_assert(sizeof value <= sizeof bits);
    std::memcpy(&bits, &value, sizeof value);
    digest = mix_bits(digest + bits);
  }
  return std::to_string(digest);
}

size_t drawn(const char* function, size_t dataset_size, const DrawOptions& options) {
  if (dataset_size == 0) throw UsageError(text(function, ": the dataset has 0 samples, expected at least 1"));
  const size_t count = options.num_samples.value_or(dataset_size);
  if (count == 0) throw UsageError(text(function, ": num_samples is 0, expected 1 or more"));
  return count;
}

std::string describe(const DrawOptions& options, size_t count) {
  return text(count, options.replacement ? " with replacement" : " without replacement", ", seed ", options.seed);
}

}  // namespace

SampleOrder::SampleOrder(std::string name, Indices indices) : name_(std::move(name)), indices_(std::move(indices)) {
  if (name_.empty()) throw UsageError("SampleOrder: the name is empty; saved states need a name of the order");
}

SampleOrder random_order(size_t dataset_size, const DrawOptions& options) {
  const size_t count = drawn("random_order", dataset_size, options);
  auto draw = [=](int64_t epoch) {
    const auto random = generator_of(options.seed, epoch);
    const auto size = static_cast<int64_t>(dataset_size), number = static_cast<int64_t>(count);
    std::vector<size_t> indices;
    if (options.replacement) append(indices, at::randint(size, {number}, random, at::kLong));
    while (indices.size() < count)
      append(indices, permutation(dataset_size, random).slice(0, 0, number - static_cast<int64_t>(indices.size())));
    return indices;
  };
  return {text("random_order of ", dataset_size, ": ", describe(options, count)), draw};
}

SampleOrder weighted_order(const std::vector<double>& weights, const DrawOptions& options) {
  const size_t count = drawn("weighted_order", weights.size(), options);
  size_t positive = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!std::isfinite(weights[i]) || weights[i] < 0)
      throw UsageError(text("weighted_order: weight ", i, " is ", weights[i], ", expected a finite number, 0 or more"));
    if (weights[i] > 0) ++positive;
  }
  if (positive == 0) throw UsageError("weighted_order: all weights are 0; at least one sample needs a weight");
  if (!options.replacement && positive < count)
    throw UsageError(text("weighted_order: cannot draw ", count, " samples without replacement, because only ",
                          positive, " have a weight above 0; draw fewer, or with replacement"));
  auto tensor = at::tensor(weights, at::kDouble);
  auto draw = [=](int64_t epoch) {
    std::vector<size_t> indices;
    append(indices, at::multinomial(tensor, static_cast<int64_t>(count), options.replacement,
                                    generator_of(options.seed, epoch)));
    return indices;
  };
  return {text("weighted_order by ", digest_of(weights), ": ", describe(options, count)), draw};
}

std::vector<double> balancing_weights(const at::Tensor& classes) {
  const auto numbers = classes.to(at::kCPU, at::kLong).flatten().contiguous();
  const int64_t* begin = numbers.data_ptr<int64_t>();
  std::map<int64_t, double> counts;
  std::for_each(begin, begin + numbers.numel(), [&](int64_t number) { ++counts[number]; });
  std::vector<double> weights;
  std::for_each(begin, begin + numbers.numel(), [&](int64_t number) { weights.push_back(1 / counts[number]); });
  return weights;
}

SampleOrder subset_order(std::vector<size_t> samples, const SubsetOptions& options) {
  if (samples.empty()) throw UsageError("subset_order: the subset has no samples, expected at least 1");
  auto name = text("subset_order ", digest_of(samples), ": ", options.shuffle ? "shuffled" : "in order", ", seed ",
                   options.seed);
  auto visit = [options, samples = std::make_shared<const std::vector<size_t>>(std::move(samples))](int64_t epoch) {
    auto indices = *samples;
    if (options.shuffle) shuffle(indices, generator_of(options.seed, epoch));
    return indices;
  };
  return {std::move(name), visit};
}

SampleOrder similar_length_order(std::vector<int64_t> lengths, const SimilarLengthOptions& options) {
  if (lengths.empty()) throw UsageError("similar_length_order: there are no lengths, expected one per sample");
  if (options.samples_per_step < 1 || options.window_steps == 0)
    throw UsageError(text("similar_length_order: samples_per_step is ", options.samples_per_step,
                          " and window_steps is ", options.window_steps,
                          ", expected 1 or more; pass batch_size times the number of ranks"));
  for (size_t i = 0; i < lengths.size(); ++i)
    if (lengths[i] <= 0)
      throw UsageError(text("similar_length_order: length ", i, " is ", lengths[i], ", expected 1 or more"));
  auto name = text("similar_length_order of ", digest_of(lengths), ": steps of ", options.samples_per_step,
                   ", windows of ", options.window_steps, ", seed ", options.seed);
  auto visit = [options, lengths = std::make_shared<const std::vector<int64_t>>(std::move(lengths))](int64_t epoch) {
    const auto random = generator_of(options.seed, epoch);
    std::vector<size_t> indices;
    append(indices, permutation(lengths->size(), random));
    using Step = std::vector<size_t>;
    std::vector<Step> steps;
    const auto samples_per_step = static_cast<size_t>(options.samples_per_step);
    const size_t window = samples_per_step * options.window_steps;
    for (size_t from = 0; from < indices.size(); from += window) {
      const auto begin = indices.begin() + static_cast<std::ptrdiff_t>(from);
      const auto end = indices.begin() + static_cast<std::ptrdiff_t>(std::min(from + window, indices.size()));
      std::stable_sort(begin, end, [&](size_t a, size_t b) { return (*lengths)[a] < (*lengths)[b]; });
      for (auto first = begin; first != end;) {
        const auto size = std::min<std::ptrdiff_t>(end - first, static_cast<std::ptrdiff_t>(samples_per_step));
        steps.emplace_back(first, first + size);
        first += size;
      }
    }
    Step smaller;
    if (steps.back().size() < samples_per_step) {
      smaller = std::move(steps.back());
      steps.pop_back();
    }
    shuffle(steps, random);
    steps.push_back(std::move(smaller));
    indices.clear();
    for (const auto& step : steps) indices.insert(indices.end(), step.begin(), step.end());
    return indices;
  };
  return {std::move(name), visit};
}

}  // namespace lockstep
