#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "bench/rank_protocol.h"
#include "bench/ranks/shared_page.h"

namespace lockstep::bench {

/// One of those that take turns: a backend with one kind of memory, or memory itself.
class Side {
 public:
  virtual ~Side() = default;

  /// Rewrites the buffers, other than the last time: `turn` counts. Local, and not timed.
  virtual void prepare(int64_t seed) = 0;

  /// One call, not timed, so that what other sides have left of caches and clocks does not count. Collective.
  virtual void warm_up() = 0;

  /// The calls of one sample, which are timed. Collective.
  virtual void run() = 0;

  /// How many elements are not what run() should have made of what prepare() wrote. Local, and not timed.
  virtual int64_t count_wrong() = 0;
};

/// A sample of several calls gives each its own buffer, so that each result can be checked; they begin on cache lines
/// of their own. From one to the next, in elements.
inline int64_t slot_stride(int64_t count, int64_t element_bytes, int calls) {
  constexpr int64_t kApartBytes = 128;
  const int64_t apart = kApartBytes / element_bytes;
  return calls == 1 ? count : (count + apart - 1) / apart * apart;
}

/// Who takes turns, and what came of it.
struct MeasuredSide {
  std::unique_ptr<Side> side;
  int calls = 1;                   // in each sample
  std::vector<double> times_us{};  // of one call on the slowest rank, for each round
  int64_t wrong = 0;               // on this rank, in all samples
};

/// Lets sides take turns, round by round, so that all see the same machine.
class Rounds {
 public:
  Rounds(const RunPlan& plan, SharedPage& page) : plan_(plan), page_(page) {}

  /// Two rounds that do not count, then as many as the plan says, or as fit into `limit`. Collective.
  void run(std::vector<MeasuredSide>& sides, std::chrono::duration<double> limit);

 private:
  using Clock = std::chrono::steady_clock;

  void run_round(std::vector<MeasuredSide>& sides);
  double slowest_time(Clock::time_point begin, Clock::time_point end);
  int choose_round_count(std::chrono::duration<double> one, std::chrono::duration<double> limit);

  const RunPlan& plan_;
  SharedPage& page_;
  int64_t last_seed_ = 0;
};

}  // namespace lockstep::bench
