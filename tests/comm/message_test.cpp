// What the flight recorder knows of messages between two ranks, and what their Work says.

#include <time.h>

#include <algorithm>
#include <latch>
#include <limits>
#include <thread>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <lockstep/error.h>
#include <lockstep/store.h>

#include "comm/group/group.h"
#include "comm/setup/init_process_group.h"
#include "support/eventually.h"
#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

using detail::CallRecord;

/// Runs the body on two ranks, as threads; it may look into the flight recorder of its rank.
class Messages : public testing::TestWithParam<std::string> {
 protected:
  using Body = std::function<void(const ProcessGroup& world, const detail::FlightRecorder& recorder)>;

  static void on_two_ranks(const Body& body) {
    auto store = make_memory_store();
    std::vector<std::thread> ranks;
    for (int rank : {0, 1})
      ranks.emplace_back([&, rank] {
        auto group = detail::init_group({.backend = GetParam(), .rank = rank, .world_size = 2, .store = store});
        body(ProcessGroup(group), *group->job()->recorder());
      });
    for (auto& rank : ranks) rank.join();
  }

  static size_t count(const detail::FlightRecorder& recorder, CallRecord::State state) {
    const auto records = recorder.records();
    return std::count_if(records.begin(), records.end(), [&](const auto& record) { return record.state == state; });
  }
};

TEST_P(Messages, WithoutElementsAreRecordedAsDone) {
  on_two_ranks([](const ProcessGroup& world, const detail::FlightRecorder& recorder) {
    const auto nothing = at::empty({0});
    for (int message = 0; message < 600; ++message) world.rank() == 0 ? world.send(nothing, 1) : world.recv(nothing, 0);
    EXPECT_EQ(recorder.records().size(), detail::FlightRecorder::kCalls);
    EXPECT_EQ(count(recorder, CallRecord::State::kDone), detail::FlightRecorder::kCalls);
    world.barrier();
  });
}

TEST_P(Messages, PolledUntilTheyAreDoneAreRecordedAsDone) {
  on_two_ranks([](const ProcessGroup& world, const detail::FlightRecorder& recorder) {
    auto tensor = at::full({1000}, world.rank() + 1.0);
    {
      auto work = world.rank() == 0 ? world.send_async(tensor, 1) : world.recv_async(tensor, 0);
      ASSERT_TRUE(eventually([&] { return work.is_done(); }));
      EXPECT_EQ(count(recorder, CallRecord::State::kDone), 1u);
      EXPECT_TRUE(work.is_done());
    }
    EXPECT_EQ(count(recorder, CallRecord::State::kDone), 1u) << "nobody waited for it";
    EXPECT_TRUE(at::equal(tensor, at::ones({1000})));
    world.barrier();
  });
}

/// The time that processors have spent on this process. Unlike the time of a clock, it does not grow while other
/// processes have the processors.
double processor_seconds() {
  timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Eight times as many take eight times as long, give or take; with a search in a list they would take 64 times as long.
// Gloo itself has such a list, of the slots of pending messages: 48000 take 7 s. For fewer it does not matter.
TEST_P(Messages, OutstandingInLargeNumbersTakeLinearTime) {
  const int messages = std::string(GetParam()) == "gloo" ? 400 : 1500;
  on_two_ranks([&](const ProcessGroup& world, const detail::FlightRecorder&) {
    const auto word = at::ones({4});
    const auto time_of = [&](int count) {
      world.barrier();
      const double begin = processor_seconds();
      std::vector<Work> works;
      for (int message = 0; message < count; ++message)
        works.push_back(world.rank() == 0 ? world.send_async(word, 1) : world.recv_async(at::empty({4}), 0));
      for (const auto& work : works) work.wait();
      world.barrier();
      return processor_seconds() - begin;
    };
    time_of(100);
    double few = std::numeric_limits<double>::max(), many = few;
    for (int attempt = 0; attempt < 5; ++attempt) {
      few = std::min(few, time_of(messages));
      many = std::min(many, time_of(8 * messages));
    }
    if (world.rank() == 0) {
      EXPECT_LT(many / few, 28) << few << " s and " << many << " s";
    }
  });
}

TEST_P(Messages, OfABrokenGroupAreDone) {
  std::latch both_receive(2);  // not a barrier of the group: the abort would break it for the rank that leaves last
  on_two_ranks([&](const ProcessGroup& world, const detail::FlightRecorder& recorder) {
    auto tensor = at::zeros({1000});
    {
      auto work = world.recv_async(tensor, 1 - world.rank());  // nobody sends
      EXPECT_FALSE(work.is_done());
      both_receive.arrive_and_wait();
      if (world.rank() == 0) world.abort("enough");
      ASSERT_TRUE(eventually([&] { return work.is_done(); }));
      expect_error<PeerError>([&] { work.wait(); }, "enough");
    }
    EXPECT_EQ(count(recorder, CallRecord::State::kFailed), 1u);
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, Messages, testing::ValuesIn(backends_under_test()),
                         [](const auto& backend) { return backend.param; });

}  // namespace
}  // namespace lockstep
