#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

#include <lockstep/detail/loader_core.h>
#include <lockstep/export.h>
#include <lockstep/process_group.h>
#include <lockstep/value.h>

namespace lockstep {

struct DataLoaderOptions;
struct StreamLoaderOptions;
struct StreamPart;

namespace detail {

/// Reads one part of the data, batch by batch. Used by one thread at a time.
class PartReader {
 public:
  struct Read {
    std::shared_ptr<void> batch{};  // null at the end of the part
    int64_t samples = 0;
  };

  virtual ~PartReader() = default;
  virtual Read next() = 0;
};

/// The part of a StreamLoader that does not depend on the type of its samples.
class LOCKSTEP_EXPORT StreamCore {
 public:
  using Batch = std::shared_ptr<void>;
  /// Opens a part and skips its first samples. Called concurrently for different parts.
  using Open = std::function<std::unique_ptr<PartReader>(const StreamPart& part, int64_t skipped)>;

  /// `on_next` is called for a batch once it has been created and is the next batch of its worker.
  StreamCore(ProcessGroup group, const StreamLoaderOptions& options, bool finds_tensors, Open open,
             const LoaderCore::OnNext& on_next);
  ~StreamCore();

  uint64_t begin();           // returns the number of the new loop
  Batch next(uint64_t loop);  // empty at the end
  void set_epoch(int64_t epoch);
  int64_t epoch() const;
  int64_t next_epoch() const;
  Value state_dict() const;
  void load_state_dict(const Value& state);
  std::chrono::nanoseconds waited() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

LOCKSTEP_EXPORT DataLoaderOptions loading_options(const StreamLoaderOptions& options);

}  // namespace detail

}  // namespace lockstep
