#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <lockstep/run_threads.h>
#include <lockstep/stream_loader.h>

namespace lockstep {

using Numbers64 = std::vector<int64_t>;
using Batches64 = std::vector<Numbers64>;

/// The numbers from `next_number` on, `step` apart, below `end`.
struct Counting {
  std::optional<int64_t> next() {
    EXPECT_FALSE(has_ended) << "next() is called after the end";
    has_ended = next_number >= end;
    if (has_ended) return std::nullopt;
    const int64_t number = next_number;
    next_number += step;
    return number;
  }

  int64_t next_number = 0;
  int64_t step = 1;
  int64_t end = 0;
  bool has_ended = false;
};

/// The numbers from 0 to `count` - 1, dealt to the parts one by one.
inline auto dealt(int64_t count) {
  return [=](const StreamPart& part) { return Counting{part.index, part.count, count}; };
}

/// Part p has samples[p] samples: 1000 p, 1000 p + 1, ...
inline auto of_lengths(Numbers64 samples) {
  return [samples = std::move(samples)](const StreamPart& part) {
    const int64_t first = 1000 * int64_t{part.index};
    return Counting{first, 1, first + samples.at(static_cast<size_t>(part.index))};
  };
}

inline Numbers64 numbers_received(const at::Tensor& batch) {
  const auto numbers = batch.contiguous();
  return {numbers.data_ptr<int64_t>(), numbers.data_ptr<int64_t>() + numbers.numel()};
}

/// The batches of a loop, or the next `most` of them, in which case the loop is left.
template <class Loader>
Batches64 received_from(Loader& loader, size_t most = SIZE_MAX) {
  Batches64 all;
  if (most == 0) return all;
  for (auto& batch : loader) {
    all.push_back(numbers_received(batch));
    if (all.size() == most) break;
  }
  return all;
}

/// What `body` returns on each rank.
template <class Result>
std::vector<Result> on_ranks(int ranks, const std::function<Result(ProcessGroup)>& body) {
  std::vector<Result> results(static_cast<size_t>(ranks));
  run_threads(ranks, [&](ProcessGroup world) {
    auto result = body(world);  // the ranks' vectors are separate objects
    results[static_cast<size_t>(world.rank())] = std::move(result);
  });
  return results;
}

/// The batches of each rank in an epoch.
template <class Open>
std::vector<Batches64> epoch_of(int ranks, const Open& open, const StreamLoaderOptions& options, int64_t epoch = 0) {
  return on_ranks<Batches64>(ranks, [&](const ProcessGroup& world) {
    StreamLoader<Open> loader(open, world, options);
    loader.set_epoch(epoch);
    return received_from(loader);
  });
}

}  // namespace lockstep
