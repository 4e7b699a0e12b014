#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <lockstep/batch_traits.h>
#include <lockstep/distributed_sampler.h>
#include <lockstep/export.h>

namespace lockstep {

struct DataLoaderOptions;
struct ReadingGroups;

namespace detail {

/// A batch in transit. Without samples, it is the end of the epoch.
struct BatchMessage {
  int64_t samples = 0;
  std::string bytes{};
};

/// The part of GroupLoader that does not depend on the type of its samples: decides which rank reads for which ranks,
/// sends the batches, and lets all ranks fail together.
class LOCKSTEP_EXPORT GroupReading {
 public:
  using Read = std::function<std::vector<BatchMessage>()>;  // one message for each rank for which this rank reads
  using Unpack = std::function<void(std::string_view bytes)>;

  GroupReading(ReadingGroups groups, DistributedSampler sampler, const DataLoaderOptions& options, bool finds_tensors);
  ~GroupReading();

  /// Calls `action` on ranks that read. If it throws, all ranks throw. Collective.
  void on_readers(const char* doing, const std::function<void()>& action) const;
  std::vector<DistributedSampler> samplers() const;             // of the ranks for which this rank reads
  void place(std::vector<DistributedSampler>& samplers) const;  // moves them to this rank's epoch and position

  uint64_t begin();  // collective; returns the number of the new loop
  /// Reads and sends the next batches, and passes this rank's batch to `unpack`. Returns false at the end. Collective.
  bool next(uint64_t loop, const Read& read, const Unpack& unpack);
  size_t size() const;
  DistributedSampler sampler() const;
  std::chrono::nanoseconds waited() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Makes a batch from samples and serializes it, on the rank that reads.
template <class Collate>
struct Packer {
  Collate collate;

  template <class Sample>
  BatchMessage operator()(std::vector<Sample> samples) {
    const auto count = static_cast<int64_t>(samples.size());
    return {count, pack_batch(collate(std::move(samples)))};
  }
};

}  // namespace detail

}  // namespace lockstep
