#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include <lockstep/data_loader.h>
#include <lockstep/detail/dataset_reading.h>
#include <lockstep/detail/loaded_batch.h>
#include <lockstep/detail/loader_core.h>
#include <lockstep/distributed_sampler.h>
#include <lockstep/tensors_in.h>

namespace lockstep {

template <class Data, class Collate>
DataLoader<Data, Collate>::DataLoader(Made, Data dataset, std::optional<DistributedSampler> sampler, Collate collate,
                                      const DataLoaderOptions& options)
    : options_(options),
      copies_(options.device),
      seed_(sampler ? sampler->options().seed : options.seed),
      collate_(std::move(collate)),
      datasets_(static_cast<size_t>(options.num_workers > 1 ? options.num_workers : 1), std::move(dataset)),
      core_(
          sampler ? *sampler : detail::sampler_of_own_data(known_size(), options), sampler.has_value(), options,
          known_size(), TensorsIn<Batch>::kAny,
          [this](int worker, const Samples& samples, int64_t epoch) { return make(worker, samples, epoch); },
          [this](void* next) { static_cast<Loaded*>(next)->start_copy(copies_); }) {}

template <class Data, class Collate>
std::optional<size_t> DataLoader<Data, Collate>::known_size() {
  if constexpr (SizedDataset<Dataset>) {
    const torch::optional<size_t> size = detail::dataset_in(datasets_.front()).size();
    if (size.has_value()) return *size;
  }
  return std::nullopt;
}

template <class Data, class Collate>
std::shared_ptr<void> DataLoader<Data, Collate>::make(int worker, const Samples& samples, int64_t epoch) {
  auto& dataset = detail::dataset_in(datasets_[static_cast<size_t>(worker)]);
  auto read = detail::read_samples<Dataset, Collate>(dataset, samples, seed_, epoch);
  auto loaded = std::make_shared<Loaded>(Loaded{collated(std::move(read), samples)});
  loaded->pin(options_);
  return loaded;
}

template <class Data, class Collate>
auto DataLoader<Data, Collate>::collated(Read read, const Samples& samples) -> Batch {
  try {
    return Collated::make(collate_, std::move(read));
  } catch (...) {
    detail::rethrow_about(samples);
  }
}

template <class Data, class Collate>
auto DataLoader<Data, Collate>::next(uint64_t loop) -> std::shared_ptr<Batch> {
  const auto loaded = std::static_pointer_cast<Loaded>(core_.next(loop));
  if (!loaded) return nullptr;
  loaded->finish_copy(copies_);
  return {loaded, &loaded->batch};
}

}  // namespace lockstep
