#include "bench/ranks/measure.h"

#include <chrono>
#include <numeric>

#include "bench/operation.h"
#include "bench/ranks/collective_sides.h"
#include "bench/ranks/pinning.h"
#include "bench/ranks/rounds.h"

namespace lockstep::bench {
namespace {

using CollectiveReport = std::function<void(const Message&)>;

constexpr std::chrono::duration<double> kAllSizes{60};  // so long may all rounds of all sizes take

/// A backend with one kind of memory.
struct Contender {
  ProcessGroup group;
  Memory memory;
};

std::vector<Contender> make_contenders(const Plan& plan, const ProcessGroup& world) {
  std::vector<int> all(static_cast<size_t>(world.size()));
  std::iota(all.begin(), all.end(), 0);
  std::vector<Contender> contenders;
  for (size_t i = 0; i < plan.backends.size(); ++i) {
    const auto group = i == 0 ? world : world.new_group(all, {.backend = plan.backends[i]});
    const bool is_barrier = plan.operation == Operation::kBarrier;  // no memory at all
    if (plan.memory == Memory::kAllocated || (plan.memory == Memory::kBoth && !is_barrier && has_own_memory(group)))
      contenders.push_back({group, Memory::kAllocated});
    if (plan.memory != Memory::kAllocated) contenders.push_back({group, Memory::kOrdinary});
  }
  return contenders;
}

class CollectiveMeasurement {
 public:
  CollectiveMeasurement(const Plan& plan, CommonPage& page, const CollectiveReport& report)
      : plan_(plan), page_(page), report_(report), rounds_(plan, page) {}

  void measure_round_trip() {
    constexpr int kTimes = 1000, kRounds = 21;
    RoundTrip round_trip;
    page_.bounce(kTimes);
    for (int round = 0; round < kRounds; ++round) round_trip.times_us.push_back(page_.bounce(kTimes));
    say(round_trip);
  }

  void measure_size(int64_t bytes, const std::vector<Contender>& contenders) {
    say(Progress{bytes});
    std::vector<Turn> turns;
    turns.push_back({std::make_unique<MemoryStream>(bytes, calls_per_sample(bytes)), calls_per_sample(bytes), {}, 0});
    for (const auto& contender : contenders)
      turns.push_back({make_side(contender, bytes), calls_per_sample(bytes), {}, 0});
    rounds_.take(turns, kAllSizes / static_cast<double>(plan_.sizes.size()));
    say(Stream{bytes, turns[0].times_us});
    for (size_t i = 0; i < contenders.size(); ++i) report_turn(bytes, contenders[i], turns[i + 1]);
  }

 private:
  std::unique_ptr<Side> make_side(const Contender& contender, int64_t bytes) const {
    if (plan_.operation == Operation::kBarrier) return make_barrier(contender.group, page_);
    return make_collective(plan_, contender.group, contender.memory, bytes);
  }

  void report_turn(int64_t bytes, const Contender& contender, const Turn& turn) {
    Samples samples;
    samples.backend = contender.group.backend_name();
    samples.memory = plan_.operation == Operation::kBarrier ? "none" : name_of(contender.memory);
    samples.bytes = bytes;
    samples.calls = turn.calls;
    samples.times_us = turn.times_us;
    if (plan_.check) samples.wrong = page_.sum(turn.wrong);
    say(samples);
  }

  void say(const Message& message) {
    if (page_.rank() == 0) report_(message);
  }

  const Plan& plan_;
  CommonPage& page_;
  const CollectiveReport& report_;
  Rounds rounds_;
};

}  // namespace

void measure(const Plan& plan, const ProcessGroup& world, CommonPage& page, const CollectiveReport& report) {
  const auto contenders = make_contenders(plan, world);
  std::optional<Pinning> pinning;
  if (plan.bind) pinning.emplace(world.rank(), world.size());  // behind the threads of all backends
  CollectiveMeasurement measurement(plan, page, report);
  measurement.measure_round_trip();
  for (int64_t bytes : plan.sizes) measurement.measure_size(bytes, contenders);
}

}  // namespace lockstep::bench
