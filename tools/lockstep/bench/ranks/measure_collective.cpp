#include "bench/ranks/measure.h"

#include <chrono>
#include <numeric>

#include "bench/operation.h"
#include "bench/ranks/collective_sides.h"
#include "bench/ranks/pinning.h"
#include "bench/ranks/rounds.h"

namespace lockstep::bench {
namespace {

using CollectiveReport = std::function<void(const CollectiveMessage&)>;

constexpr std::chrono::duration<double> kAllSizes{60};  // time for all rounds of all sizes

/// A backend with one kind of memory.
struct Candidate {
  ProcessGroup group;
  Memory memory;
};

std::vector<Candidate> make_candidates(const CollectivePlan& plan, const ProcessGroup& world) {
  std::vector<int> all(static_cast<size_t>(world.size()));
  std::iota(all.begin(), all.end(), 0);
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < plan.backends.size(); ++i) {
    const auto group = i == 0 ? world : world.new_group(all, {.backend = plan.backends[i]});
    const bool is_barrier = plan.operation == Operation::kBarrier;  // uses no memory
    if (plan.memory == Memory::kAllocated || (plan.memory == Memory::kBoth && !is_barrier && has_own_memory(group)))
      candidates.push_back({group, Memory::kAllocated});
    if (plan.memory != Memory::kAllocated) candidates.push_back({group, Memory::kOrdinary});
  }
  return candidates;
}

class CollectiveMeasurement {
 public:
  CollectiveMeasurement(const CollectivePlan& plan, SharedPage& page, const CollectiveReport& report)
      : plan_(plan), page_(page), report_(report), rounds_(plan, page) {}

  void measure_round_trip() {
    constexpr int kTimes = 1000, kRounds = 21;
    RoundTripTimes round_trip;
    page_.round_trip_us(kTimes);
    for (int round = 0; round < kRounds; ++round) round_trip.times_us.push_back(page_.round_trip_us(kTimes));
    send(round_trip);
  }

  void measure_size(int64_t bytes, const std::vector<Candidate>& candidates) {
    send(SizeStarted{bytes});
    std::vector<MeasuredSide> sides;
    sides.push_back({std::make_unique<MemoryStream>(bytes, calls_per_sample(bytes)), calls_per_sample(bytes), {}, 0});
    for (const auto& candidate : candidates)
      sides.push_back({make_side(candidate, bytes), calls_per_sample(bytes), {}, 0});
    rounds_.run(sides, kAllSizes / static_cast<double>(plan_.sizes.size()));
    send(StreamTimes{bytes, sides[0].times_us});
    for (size_t i = 0; i < candidates.size(); ++i) report_samples(bytes, candidates[i], sides[i + 1]);
  }

 private:
  std::unique_ptr<Side> make_side(const Candidate& candidate, int64_t bytes) const {
    if (plan_.operation == Operation::kBarrier) return make_barrier(candidate.group, page_);
    return make_collective(plan_, candidate.group, candidate.memory, bytes);
  }

  void report_samples(int64_t bytes, const Candidate& candidate, const MeasuredSide& measured) {
    CollectiveSamples samples;
    samples.backend = candidate.group.backend_name();
    samples.memory = plan_.operation == Operation::kBarrier ? "none" : name_of(candidate.memory);
    samples.bytes = bytes;
    samples.calls = measured.calls;
    samples.times_us = measured.times_us;
    if (plan_.check) samples.wrong = page_.sum(measured.wrong);
    send(samples);
  }

  void send(const CollectiveMessage& message) {
    if (page_.rank() == 0) report_(message);
  }

  const CollectivePlan& plan_;
  SharedPage& page_;
  const CollectiveReport& report_;
  Rounds rounds_;
};

}  // namespace

void measure_collective(const CollectivePlan& plan, const ProcessGroup& world, SharedPage& page,
                        const CollectiveReport& report) {
  const auto candidates = make_candidates(plan, world);
  std::optional<Pinning> pinning;
  if (plan.bind) pinning.emplace(world.rank(), world.size());  // after all backends have started their threads
  CollectiveMeasurement measurement(plan, page, report);
  measurement.measure_round_trip();
  for (int64_t bytes : plan.sizes) measurement.measure_size(bytes, candidates);
}

}  // namespace lockstep::bench
