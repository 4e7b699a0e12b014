#include "measure.h"

#include <algorithm>
#include <chrono>
#include <numeric>

#include "barrier.h"
#include "bench/sizes.h"
#include "collective.h"
#include "memory_stream.h"
#include "pinning.h"

namespace lockstep::bench {
namespace {

using Clock = std::chrono::steady_clock;
using Report = std::function<void(const Message&)>;

constexpr int kWarmUps = 2;
constexpr int kFewestRounds = 5, kMostRounds = 101;
constexpr std::chrono::duration<double> kAllSizes{60};  // so long may all rounds of all sizes take

/// Who takes turns in one size, and what came of it.
struct Turn {
  Samples samples;  // without a backend: memory itself
  std::unique_ptr<Side> side;
};

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

class Measurement {
 public:
  Measurement(const Plan& plan, CommonPage& page, const Report& report) : plan_(plan), page_(page), report_(report) {}

  void measure_round_trip() {
    constexpr int kTimes = 1000, kRounds = 21;
    RoundTrip round_trip;
    page_.bounce(kTimes);
    for (int round = 0; round < kRounds; ++round) round_trip.times_us.push_back(page_.bounce(kTimes));
    say(round_trip);
  }

  void measure_size(int64_t bytes, const std::vector<Contender>& contenders) {
    say(Progress{bytes});
    auto turns = make_turns(bytes, contenders);
    Clock::time_point begin;
    for (int round = 0; round < kWarmUps; ++round) {
      begin = Clock::now();
      take_turns(turns);
    }
    const int rounds = choose_rounds(Clock::now() - begin);
    for (auto& turn : turns) turn.samples.times_us.clear();
    for (int round = 0; round < rounds; ++round) take_turns(turns);
    report_turns(turns);
  }

 private:
  std::vector<Turn> make_turns(int64_t bytes, const std::vector<Contender>& contenders) const {
    const int calls = calls_per_sample(bytes);
    std::vector<Turn> turns;
    turns.push_back({{"", "", bytes, calls, 0, {}}, std::make_unique<MemoryStream>(bytes, calls)});
    for (const auto& [group, memory] : contenders) {
      const bool is_barrier = plan_.operation == Operation::kBarrier;
      turns.push_back({{group.backend_name(), is_barrier ? "none" : name_of(memory), bytes, calls, 0, {}},
                       is_barrier ? make_barrier(group, page_) : make_collective(plan_, group, memory, bytes)});
    }
    return turns;
  }

  void take_turns(std::vector<Turn>& turns) {
    for (auto& turn : turns) {
      turn.side->prepare(++turns_taken_);
      turn.side->warm_up();
      turn.side->prepare(++turns_taken_);
      page_.meet();
      const auto begin = Clock::now();
      turn.side->run();
      turn.samples.times_us.push_back(compare(begin, Clock::now()) / turn.samples.calls);
      if (plan_.check) *turn.samples.wrong += turn.side->count_wrong();
    }
  }

  /// The slowest rank's time. Where ranks share cores, one may begin when another has long ended: then all of it, from
  /// the first to begin to the last to end.
  double compare(Clock::time_point begin, Clock::time_point end) {
    const auto since_boot = [](Clock::time_point time) {
      return std::chrono::duration<double, std::micro>(time.time_since_epoch()).count();
    };
    if (plan_.is_crowded) return page_.largest(since_boot(end)) + page_.largest(-since_boot(begin));
    return page_.largest(since_boot(end) - since_boot(begin));
  }

  int choose_rounds(std::chrono::duration<double> one) {
    if (plan_.rounds > 0) return plan_.rounds;
    const double fit = kAllSizes.count() / static_cast<double>(plan_.sizes.size()) / one.count();
    const auto mine = std::clamp(fit, static_cast<double>(kFewestRounds), static_cast<double>(kMostRounds));
    return static_cast<int>(page_.decided(static_cast<int64_t>(mine)));
  }

  void report_turns(std::vector<Turn>& turns) {
    for (auto& [samples, side] : turns) {
      const int64_t wrong = page_.sum(*samples.wrong);
      samples.wrong = plan_.check ? std::optional(wrong) : std::nullopt;
      if (samples.backend.empty())
        say(Stream{samples.bytes, samples.times_us});
      else
        say(samples);
    }
  }

  void say(const Message& message) {
    if (page_.rank() == 0) report_(message);
  }

  const Plan& plan_;
  CommonPage& page_;
  const Report& report_;
  int64_t turns_taken_ = 0;
};

}  // namespace

void measure(const Plan& plan, const ProcessGroup& world, CommonPage& page, const Report& report) {
  const auto contenders = make_contenders(plan, world);
  if (plan.bind) pin_this_thread(world.rank(), world.size());  // behind the threads of all backends
  Measurement measurement(plan, page, report);
  measurement.measure_round_trip();
  for (int64_t bytes : plan.sizes) measurement.measure_size(bytes, contenders);
}

}  // namespace lockstep::bench
