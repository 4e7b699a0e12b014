#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/ArrayRef.h>

#include <lockstep/collate.h>
#include <lockstep/export.h>

namespace lockstep::detail {

/// Returns the seed of a sample's generator, which depends on the sampler's seed, the epoch and the sample. With a
/// million samples, two of them share a seed with a probability of 3e-8.
LOCKSTEP_EXPORT uint64_t sample_seed(uint64_t seed, int64_t epoch, size_t sample);
/// Seeds a CPU generator with all 64 bits; LibTorch's set_current_seed uses only 32 of them.
LOCKSTEP_EXPORT void seed_generator(at::Generator& random, uint64_t seed);

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

}  // namespace lockstep::detail
