#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "bench/rank_protocol.h"
#include "bench/ranks/shared_page.h"

namespace lockstep::bench {

/// One of the variants that are compared in turn: a backend with one kind of memory, a kind of training, or memory
/// alone.
class Side {
 public:
  virtual ~Side() = default;

  /// Fills the buffers with values that depend on `seed`, which differs in every call. Local, not timed.
  virtual void prepare(int64_t seed) = 0;

  /// Makes one untimed call, so that the state in which other sides left the caches and clocks does not count.
  /// Collective.
  virtual void warm_up() = 0;

  /// Makes the calls of one sample, which are timed. Collective.
  virtual void run() = 0;

  /// The number of elements in the results of run() that are wrong. Not timed. Called on every rank.
  virtual int64_t count_wrong() = 0;
};

/// The distance between the buffers of a sample, in elements. Each call has its own buffer, so that each result can be
/// checked; the buffers start on separate cache lines.
inline int64_t slot_stride(int64_t count, int64_t element_bytes, int calls) {
  constexpr int64_t kApartBytes = 128;
  const int64_t apart = kApartBytes / element_bytes;
  return calls == 1 ? count : (count + apart - 1) / apart * apart;
}

/// A side with its measurements.
struct MeasuredSide {
  std::unique_ptr<Side> side;
  int calls = 1;                   // in each sample
  std::vector<double> times_us{};  // of one call on the slowest rank, one entry per round
  int64_t wrong = 0;               // on this rank, in all samples
};

/// Runs the sides in turn, round by round, so that all sides are measured in the same state of the machine.
class Rounds {
 public:
  Rounds(const RunPlan& plan, SharedPage& page) : plan_(plan), page_(page) {}

  /// Runs two warm-up rounds, then as many rounds as the plan requests, or as fit into `limit`. Collective.
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
