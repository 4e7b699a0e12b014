#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "bench/ranks/common_page.h"
#include "bench/ranks/side.h"
#include "bench/run_plan.h"

namespace lockstep::bench {

/// Who takes turns, and what came of it.
struct Turn {
  std::unique_ptr<Side> side;
  int calls = 1;                   // in each sample
  std::vector<double> times_us{};  // of one call on the slowest rank, for each round
  int64_t wrong = 0;               // on this rank, in all samples
};

/// Lets sides take turns, round by round, so that all see the same machine.
class Rounds {
 public:
  Rounds(const RunPlan& plan, CommonPage& page) : plan_(plan), page_(page) {}

  /// Two rounds that do not count, then as many as the plan says, or as fit into `limit`. Collective.
  void take(std::vector<Turn>& turns, std::chrono::duration<double> limit);

 private:
  using Clock = std::chrono::steady_clock;

  void take_one(std::vector<Turn>& turns);
  double compare(Clock::time_point begin, Clock::time_point end);
  int choose(std::chrono::duration<double> one, std::chrono::duration<double> limit);

  const RunPlan& plan_;
  CommonPage& page_;
  int64_t turns_taken_ = 0;
};

}  // namespace lockstep::bench
