#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <lockstep/distributed_sampler.h>
#include <lockstep/export.h>

namespace lockstep {

struct DataLoaderOptions;

namespace detail {

/// The part of a loader that does not depend on the type of its samples: splits a sampler's samples into batches, which
/// worker threads make.
class LOCKSTEP_EXPORT LoaderCore {
 public:
  using Samples = std::vector<size_t>;
  using Batch = std::shared_ptr<void>;
  using Make = std::function<Batch(int worker, const Samples& samples, int64_t epoch)>;
  /// Called for a batch once it has been created and is the next batch to deliver.
  using OnNext = std::function<void(void* batch)>;

  /// `has_sampler`: the program has passed the sampler. Otherwise it is that of sampler_of_own_data().
  LoaderCore(DistributedSampler sampler, bool has_sampler, const DataLoaderOptions& options,
             std::optional<size_t> dataset_size, bool finds_tensors, Make make, OnNext on_next);
  ~LoaderCore();

  uint64_t begin();           // returns the number of the new loop
  Batch next(uint64_t loop);  // empty at the end
  size_t size() const;
  DistributedSampler sampler() const;
  bool has_sampler() const;
  std::chrono::nanoseconds waited() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Returns the sampler of a DataLoader that was made without one. Throws UsageError if the size is 0 or unknown.
LOCKSTEP_EXPORT DistributedSampler sampler_of_own_data(std::optional<size_t> dataset_size,
                                                       const DataLoaderOptions& options);

/// Throws UsageError for options that no loader accepts, in the name of `loader`.
void check_loading(const char* loader, std::optional<int> rank, const DataLoaderOptions& options, bool finds_tensors);

/// Returns the number of batches in this many samples.
LOCKSTEP_EXPORT size_t batches_in(size_t samples, const DataLoaderOptions& options);

/// Throws UsageError for invalid options. `dataset_size` is none if it is unknown.
LOCKSTEP_EXPORT void check_loader_options(const DataLoaderOptions& options, const DistributedSampler& sampler,
                                          std::optional<size_t> dataset_size, bool finds_tensors);

}  // namespace detail

}  // namespace lockstep
