#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include <lockstep/detail/stream_core.h>
#include <lockstep/detail/stream_reader.h>
#include <lockstep/process_group.h>
#include <lockstep/stream_loader.h>
#include <lockstep/tensors_in.h>

namespace lockstep {

template <class Open, class Collate>
StreamLoader<Open, Collate>::StreamLoader(Made, Open open, ProcessGroup group, Collate collate,
                                          const StreamLoaderOptions& options)
    : options_(detail::loading_options(options)),
      copies_(options.device),
      open_(std::move(open)),
      collate_(std::move(collate)),
      core_(
          std::move(group), options, TensorsIn<Batch>::kAny,
          [this](const StreamPart& part, int64_t skipped) {
            return std::make_unique<detail::StreamReader<Open, Collate>>(open_, collate_, options_, part, skipped);
          },
          [this](void* next) { static_cast<Loaded*>(next)->start_copy(copies_); }) {}

template <class Open, class Collate>
auto StreamLoader<Open, Collate>::next(uint64_t loop) -> std::shared_ptr<Batch> {
  const auto loaded = std::static_pointer_cast<Loaded>(core_.next(loop));
  if (!loaded) return nullptr;
  loaded->finish_copy(copies_);
  return {loaded, &loaded->batch};
}

}  // namespace lockstep
