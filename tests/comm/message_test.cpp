// What the flight recorder knows of messages between two ranks, and what their Work says.

#include <time.h>

#include <algorithm>
#include <latch>
#include <limits>
#include <set>
#include <thread>
#include <utility>

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

/// Ranks 1 and 2 send to rank 0, which receives from any.
class AnySender : public testing::TestWithParam<std::string> {
 protected:
  static void on_three_ranks(const std::function<void(ProcessGroup)>& body) {
    run_threads(3, body, {.backend = GetParam(), .timeout = std::chrono::minutes(1)});
  }
};

TEST_P(AnySender, IsTheRankThatSendsFirst) {
  on_three_ranks([](const ProcessGroup& world) {
    for (const int sender : {2, 1, 1, 2}) {
      auto tensor = at::full({700}, static_cast<float>(world.rank()));
      if (world.rank() == sender) world.send(tensor, 0, 4);
      if (world.rank() == 0) {
        EXPECT_EQ(world.recv_any(tensor, 4), sender);
        EXPECT_TRUE(at::equal(tensor, at::full({700}, static_cast<float>(sender))));
      }
      world.barrier();
    }
  });
}

TEST_P(AnySender, IsFoundIfItSentBeforeTheFirstReceive) {
  on_three_ranks([](const ProcessGroup& world) {
    auto tensor = at::full({3}, static_cast<float>(world.rank()));
    std::vector<Work> sends;
    if (world.rank() > 0)
      for (uint32_t tag : {0, 9}) sends.push_back(world.send_async(tensor, 0, tag));
    world.barrier();
    if (world.rank() == 0)
      for (uint32_t tag : {9, 0}) {
        auto directly = at::zeros({3});
        world.recv(directly, 1, tag);  // which recv_any then does not report again
        EXPECT_EQ(world.recv_any(tensor, tag), 2);
        EXPECT_EQ(tensor[0].item<float>(), 2);
        expect_error<TimeoutError>([&] { world.recv_any(tensor, tag, {.timeout = std::chrono::milliseconds(20)}); },
                                   "rank 0: recv_any", "with tag " + std::to_string(tag), "20 ms", "stays usable");
      }
    for (const auto& send : sends) send.wait();
    world.barrier();
  });
}

TEST_P(AnySender, TakesTurns) {
  on_three_ranks([](const ProcessGroup& world) {
    constexpr int kEach = 40;
    std::vector<Work> sends;
    auto tensor = at::ones({2});
    if (world.rank() > 0) world.send(tensor, 0);
    for (int i = 0; world.rank() == 0 && i < 2; ++i) world.recv_any(tensor);  // now both announce their messages
    world.barrier();
    if (world.rank() > 0)
      for (int i = 0; i < kEach; ++i) sends.push_back(world.send_async(at::full({2}, static_cast<float>(i)), 0));
    world.monitored_barrier();  // behind the announcements, through the store
    std::vector<int> received(3);
    for (int i = 0, last = 0; world.rank() == 0 && i < 2 * kEach; ++i) {
      const int sender = world.recv_any(tensor);
      EXPECT_NE(sender, std::exchange(last, sender));
      EXPECT_EQ(tensor[1].item<int>(), received[sender]++) << "the messages of a rank arrive in order";
    }
    for (const auto& send : sends) send.wait();
    world.barrier();
  });
}

// The ranks send what is waited for only when rank 0 has received an earlier message.
TEST_P(AnySender, IsFoundWhileOtherMessagesAreUnderWay) {
  on_three_ranks([](const ProcessGroup& world) {
    if (world.rank() > 0) {
      world.send(at::ones({70000}), 0, 1);
      world.send(at::ones({2}), 0, 2);
      return world.barrier();
    }
    auto first = at::zeros({2, 70000}), second = at::zeros({2});
    const std::vector<Work> earlier{world.recv_async(first[0], 1, 1), world.recv_async(first[1], 2, 1)};
    std::set<int> senders;
    for (int i = 0; i < 2; ++i) senders.insert(world.recv_any(second, 2));
    EXPECT_EQ(senders, (std::set<int>{1, 2}));
    for (const auto& work : earlier) work.wait();
    EXPECT_TRUE(first.eq(1).all().item<bool>());
    world.barrier();
  });
}

TEST_P(AnySender, MayHaveSentNothingAndLeft) {
  on_three_ranks([](const ProcessGroup& world) {
    auto group = world.new_group({0, 1, 2});
    const auto nothing = at::empty({0});
    if (world.rank() > 0) {
      group.send(nothing, 0);
      group.destroy();
    }
    world.barrier();
    std::set<int> senders;
    for (int i = 0; world.rank() == 0 && i < 2; ++i) senders.insert(group.recv_any(nothing));
    EXPECT_EQ(senders, world.rank() == 0 ? (std::set<int>{1, 2}) : std::set<int>{});
    world.barrier();
  });
}

TEST_P(AnySender, SendsObjectsToo) {
  on_three_ranks([](const ProcessGroup& world) {
    if (world.rank() > 0) world.send_object("from " + std::to_string(world.rank()), 0, 1);
    std::set<int> senders;
    while (world.rank() == 0 && senders.size() < 2) {
      const auto [sender, object] = world.recv_any_object(1);
      EXPECT_EQ(object.toStringRef(), "from " + std::to_string(sender));
      EXPECT_TRUE(senders.insert(sender).second);
    }
    world.barrier();
  });
}

TEST_P(AnySender, InASubgroupIsARankOfTheSubgroup) {
  on_three_ranks([](const ProcessGroup& world) {
    const auto pair = world.new_group({0, 2});
    auto tensor = at::ones({2});
    if (world.rank() == 2) pair.send(tensor, 0);
    EXPECT_EQ(world.rank() == 0 ? pair.recv_any(tensor) : 1, 1);
    const auto alone = world.split_group(world.rank());
    expect_error<UsageError>([&] { alone.recv_any(tensor); }, "recv_any", "no other rank");
    expect_error<UsageError>([&] { world.recv_any(at::Tensor()); }, "recv", "undefined");
    world.barrier();
  });
}

TEST_P(AnySender, IsAPeerErrorWhenAllOthersHaveLeft) {
  on_three_ranks([](const ProcessGroup& world) {
    auto group = world.new_group({0, 1, 2});
    auto tensor = at::ones({2});
    if (world.rank() == 1) group.send(tensor, 0);
    EXPECT_EQ(world.rank() == 0 ? group.recv_any(tensor) : 1, 1);
    world.barrier();
    if (world.rank() > 0) group.destroy();
    if (world.rank() == 0)
      expect_error<PeerError>([&] { group.recv_any(tensor); }, "rank 0", "all other ranks have left", "tag 0");
    world.barrier();
  });
}

TEST_P(AnySender, IsAPeerErrorWhenTheGroupIsBroken) {
  run_threads_into_an_error(3,
                            [](ProcessGroup world) {
                              auto tensor = at::ones({2});
                              if (world.rank() == 2)
                                world.abort("out of paper");
                              else
                                expect_error<PeerError>([&] { world.recv_any(tensor); }, "recv_any", "out of paper");
                            },
                            {.backend = GetParam(), .timeout = std::chrono::minutes(1)});
}

INSTANTIATE_TEST_SUITE_P(On, AnySender, testing::ValuesIn(backends_under_test()),
                         [](const auto& info) { return info.param; });

INSTANTIATE_TEST_SUITE_P(Backends, Messages, testing::ValuesIn(backends_under_test()),
                         [](const auto& backend) { return backend.param; });

}  // namespace
}  // namespace lockstep
