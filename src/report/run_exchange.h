#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include <lockstep/process_group.h>

namespace lockstep::detail {

/// The exchange of a few numbers in which the ranks of a TrainingRun agree on when to stop and when to save, though
/// signals arrive at different times and clocks differ. It is one small all-reduce in some of the steps: rank 0
/// measures the steps and proposes after how many the next exchange is due, so that there are a few in a second,
/// whether steps take 0.1 ms or a minute. Not thread-safe.
class RunExchange {
 public:
  /// The numbers that a rank sends to the other ranks.
  struct Message {
    bool is_signalled = false;
    bool is_save_due = false;  // of rank 0
    int64_t samples = 0;       // since the last exchange
    /// Describes a value that is NaN or infinite, if the run must stop at such values.
    std::optional<std::string> non_finite{};
  };
  /// The result, the same on all ranks.
  struct Agreed {
    bool stops = false;
    bool saves = false;
    int64_t samples = 0;       // of all ranks
    std::string non_finite{};  // descriptions of all ranks that have one, with the ranks; empty if there is none
  };

  explicit RunExchange(ProcessGroup group) : group_(std::move(group)) {}

  /// Counts a step. Returns whether the exchange is due after it: on all ranks or on none.
  bool count_step() { return ++steps_since_ >= steps_until_; }
  /// Collective.
  Agreed run(const Message& own);

 private:
  using Clock = std::chrono::steady_clock;

  int64_t propose_steps() const;

  const ProcessGroup group_;
  int64_t steps_until_ = 1;  // the next exchange
  int64_t steps_since_ = 0;  // the last exchange
  Clock::time_point last_ = Clock::now();
};

}  // namespace lockstep::detail
