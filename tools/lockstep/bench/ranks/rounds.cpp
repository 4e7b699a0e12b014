#include "bench/ranks/rounds.h"

#include <algorithm>

namespace lockstep::bench {
namespace {

constexpr int kWarmUps = 2;
constexpr int kFewestRounds = 5, kMostRounds = 101;

}  // namespace

void Rounds::take(std::vector<Turn>& turns, std::chrono::duration<double> limit) {
  Clock::time_point begin;
  for (int round = 0; round < kWarmUps; ++round) {
    begin = Clock::now();
    take_one(turns);
  }
  const int rounds = choose(Clock::now() - begin, limit);
  for (auto& turn : turns) turn.times_us.clear();
  for (int round = 0; round < rounds; ++round) take_one(turns);
}

void Rounds::take_one(std::vector<Turn>& turns) {
  for (auto& turn : turns) {
    turn.side->prepare(++turns_taken_);
    turn.side->warm_up();
    turn.side->prepare(++turns_taken_);
    page_.meet();
    const auto begin = Clock::now();
    turn.side->run();
    turn.times_us.push_back(compare(begin, Clock::now()) / turn.calls);
    if (plan_.check) turn.wrong += turn.side->count_wrong();
  }
}

/// The slowest rank's time. Where ranks share cores, one may begin when another has long ended: then all of it, from
/// the first to begin to the last to end.
double Rounds::compare(Clock::time_point begin, Clock::time_point end) {
  const auto since_boot = [](Clock::time_point time) {
    return std::chrono::duration<double, std::micro>(time.time_since_epoch()).count();
  };
  if (plan_.is_crowded) return page_.largest(since_boot(end)) + page_.largest(-since_boot(begin));
  return page_.largest(since_boot(end) - since_boot(begin));
}

int Rounds::choose(std::chrono::duration<double> one, std::chrono::duration<double> limit) {
  if (plan_.rounds > 0) return plan_.rounds;
  const auto mine = std::clamp(limit / one, static_cast<double>(kFewestRounds), static_cast<double>(kMostRounds));
  return static_cast<int>(page_.decided(static_cast<int64_t>(mine)));
}

}  // namespace lockstep::bench
