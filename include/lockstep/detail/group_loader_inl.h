#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <lockstep/batch_traits.h>
#include <lockstep/detail/group_reading.h>
#include <lockstep/distributed_sampler.h>
#include <lockstep/group_loader.h>
#include <lockstep/tensors_in.h>

namespace lockstep {

template <class Open, class Collate>
GroupLoader<Open, Collate>::GroupLoader(Made, Open open, DistributedSampler sampler, ReadingGroups groups,
                                        Collate collate, const DataLoaderOptions& options)
    : options_(options),
      copies_(options.device),
      reading_(std::move(groups), std::move(sampler), options, TensorsIn<Batch>::kAny) {
  std::optional<Data> dataset;
  reading_.on_readers("cannot open the dataset", [&] { dataset.emplace(open()); });
  reading_.on_readers("cannot create a DataLoader", [&] {
    auto for_readers = options;
    for_readers.device.reset();
    for_readers.pin_memory = false;
    samplers_ = reading_.samplers();
    for (const auto& each : samplers_)
      loaders_.push_back(std::make_unique<Loader>(*dataset, each, detail::Packer<Collate>{collate}, for_readers));
  });
}

template <class Open, class Collate>
auto GroupLoader<Open, Collate>::next(uint64_t loop) -> std::shared_ptr<Batch> {
  std::shared_ptr<Batch> batch;
  const auto unpack = [&](std::string_view bytes) {
    const auto loaded = std::make_shared<Loaded>(Loaded{detail::unpack_batch<Batch>(bytes)});
    loaded->pin(options_);
    loaded->finish_copy(copies_);
    batch = {loaded, &loaded->batch};
  };
  return reading_.next(
             loop, [this] { return read(); }, unpack)
             ? batch
             : nullptr;
}

template <class Open, class Collate>
std::vector<detail::BatchMessage> GroupLoader<Open, Collate>::read() {
  std::vector<detail::BatchMessage> messages;
  if (batches_.empty()) reading_.place(samplers_);
  for (size_t i = 0; i < loaders_.size(); ++i) {
    if (i == batches_.size())
      batches_.push_back(loaders_[i]->begin());
    else
      ++batches_[i];
    messages.push_back(batches_[i] == loaders_[i]->end() ? detail::BatchMessage() : std::move(*batches_[i]));
  }
  return messages;
}

}  // namespace lockstep
