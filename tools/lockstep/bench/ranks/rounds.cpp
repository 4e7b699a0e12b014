#include "bench/ranks/rounds.h"

#include <algorithm>

namespace lockstep::bench {
namespace {

constexpr int kWarmUps = 2;
constexpr int kMinRounds = 5, kMaxRounds = 101;

}  // namespace

void Rounds::run(std::vector<MeasuredSide>& sides, std::chrono::duration<double> limit) {
  Clock::time_point begin;
  for (int round = 0; round < kWarmUps; ++round) {
    begin = Clock::now();
    run_round(sides);
  }
  const int rounds = choose_round_count(Clock::now() - begin, limit);
  for (auto& measured : sides) measured.times_us.clear();
  for (int round = 0; round < rounds; ++round) run_round(sides);
}

void Rounds::run_round(std::vector<MeasuredSide>& sides) {
  for (auto& measured : sides) {
    measured.side->prepare(++last_seed_);
    measured.side->warm_up();
    measured.side->prepare(++last_seed_);
    page_.barrier();
    const auto begin = Clock::now();
    measured.side->run();
    measured.times_us.push_back(slowest_time(begin, Clock::now()) / measured.calls);
    if (plan_.check) measured.wrong += measured.side->count_wrong();
  }
}

/// The time of the slowest rank. If ranks share cores, one rank may start after another has finished; then the time
/// from the first start to the last end.
double Rounds::slowest_time(Clock::time_point begin, Clock::time_point end) {
  const auto since_boot = [](Clock::time_point time) {
    return std::chrono::duration<double, std::micro>(time.time_since_epoch()).count();
  };
  if (plan_.oversubscribed) return page_.max(since_boot(end)) + page_.max(-since_boot(begin));
  return page_.max(since_boot(end) - since_boot(begin));
}

int Rounds::choose_round_count(std::chrono::duration<double> one, std::chrono::duration<double> limit) {
  if (plan_.rounds > 0) return plan_.rounds;
  const auto rounds = std::clamp(limit / one, static_cast<double>(kMinRounds), static_cast<double>(kMaxRounds));
  return static_cast<int>(page_.broadcast(static_cast<int64_t>(rounds)));
}

}  // namespace lockstep::bench
