#include <lockstep/process_group.h>

#include <cstdlib>
#include <random>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <gtest/gtest.h>

#include <lockstep/error.h>
#include <lockstep/group_layout.h>
#include <lockstep/run_threads.h>

#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using Ranks = std::vector<int>;

class Groups : public testing::TestWithParam<std::string> {
 protected:
  void on_ranks(int size, const std::function<void(ProcessGroup)>& body) {
    if (!ranks_are_processes()) return run_threads(size, body, {.backend = GetParam(), .timeout = 60s});
    const bool has_gpu = GetParam().find("nccl") != std::string::npos;
    auto world = init_process_group({.backend = GetParam(),
                                     .timeout = 60s,
                                     .device = has_gpu ? c10::Device(c10::kCUDA, 0) : c10::Device(c10::kCPU)});
    ASSERT_EQ(world.size(), size) << "started with another number of processes than the filter selects";
    body(world);
  }
};

float sum_over(const ProcessGroup& group, double value) {
  auto tensor = at::full({3}, value, group.device());
  group.all_reduce(tensor);
  return tensor[2].item<float>();
}

TEST_P(Groups, ASplitIsOfTheRanksWithTheSameColorInTheOrderOfTheirKeys) {
  on_ranks(4, [](ProcessGroup world) {
    const int me = world.rank();
    auto halves = world.split_group(me % 2);
    EXPECT_EQ(halves.global_ranks(), (me % 2 == 0 ? Ranks{0, 2} : Ranks{1, 3}));
    EXPECT_EQ(sum_over(halves, me + 1), me % 2 == 0 ? 4 : 6);

    auto reversed = world.split_group(7, -me);
    EXPECT_EQ(reversed.global_ranks(), (Ranks{3, 2, 1, 0}));
    EXPECT_EQ(reversed.rank(), 3 - me);
    auto from_rank_3 = at::full({2}, static_cast<float>(me), world.device());
    reversed.broadcast(from_rank_3, 0);
    EXPECT_EQ(from_rank_3[0].item<float>(), 3);

    auto pair = world.split_group(me >= 2 ? 0 : -1);  // ranks 0 and 1 are in no group
    EXPECT_EQ(pair.contains_me(), me >= 2);
    EXPECT_EQ(me >= 2 ? sum_over(pair, me) : 5, 5);
    expect_error<UsageError>([&] { world.split_group(-1); }, "rank " + std::to_string(me), "split_group", "negative");
    world.barrier();
  });
}

TEST_P(Groups, AGroupOfSomeRanksIsTheirsAlone) {
  on_ranks(4, [](ProcessGroup world) {
    auto group = world.new_group({3, 1});
    bool is_in = world.rank() == 1 || world.rank() == 3;
    EXPECT_EQ(group.contains_me(), is_in);
    EXPECT_EQ(group.size(), 2);
    EXPECT_EQ(group.name(), "world/1");
    EXPECT_EQ(group.global_ranks(), (Ranks{1, 3})) << "in order, as in PyTorch";
    EXPECT_EQ(group.global_rank(1), 3);
    EXPECT_EQ(group.group_rank(3), 1);
    EXPECT_EQ(group.group_rank(0), -1);
    expect_error<UsageError>([&] { group.global_rank(2); }, "world/1", "0 to 1", "2");
    EXPECT_EQ(group.rank(), is_in ? world.rank() / 2 : -1);
    if (!is_in) {
      expect_error<UsageError>([&] { group.barrier(); }, "rank " + std::to_string(world.rank()), "world/1", "1 and 3",
                               "contains_me()");
      expect_error<UsageError>([&] { group.allocate({2}, at::kFloat); }, "contains_me()");
      expect_error<UsageError>([&] { group.new_group({0}); }, "contains_me()");
      return;
    }
    EXPECT_EQ(sum_over(group, world.rank()), 4);
    auto tensor = at::full({2}, world.rank() + 1.0, world.device());
    group.broadcast(tensor, /*src=*/1);
    EXPECT_EQ(tensor[0].item<float>(), 4) << "the group's rank 1 is rank 3 of the job";
  });
}

TEST_P(Groups, ConsecutiveSubgroupsOfOneSize) {
  on_ranks(6, [](ProcessGroup world) {
    auto mine = world.new_subgroups(3);
    GroupLayout layout(world, 3);
    EXPECT_EQ(mine.global_ranks(), layout.group());
    EXPECT_EQ(mine.rank(), layout.local_group_rank());
    EXPECT_EQ(sum_over(mine, world.rank()), world.rank() < 3 ? 3 : 12);
    expect_error<UsageError>([&] { world.new_subgroups(4); }, "groups of 4", "6 ranks", "divide",
                             "new_subgroups_by_enumeration");
  });
}

// One group of neighbours to broadcast data in, one across them to reduce the model over.
TEST_P(Groups, BroadcastAndModelGroupsCross) {
  on_ranks(6, [](ProcessGroup world) {
    auto data = world.new_subgroups(3);
    auto model = world.new_subgroups_by_enumeration({{0, 3}, {1, 4}, {2, 5}});
    EXPECT_EQ(model.global_ranks(), GroupLayout(world, 3).across());
    EXPECT_EQ(sum_over(model, world.rank()), 2 * (world.rank() % 3) + 3);
    auto batch = at::full({2}, data.rank() == 0 ? world.rank() + 10.0 : 0.0, world.device());
    data.broadcast(batch, 0);
    EXPECT_EQ(batch[0].item<float>(), world.rank() < 3 ? 10 : 13);
    EXPECT_EQ(sum_over(world, 1), 6) << "the world goes on";
  });
}

TEST_P(Groups, ARankThatIsInNoneOfTheListedGroupsGetsOneThatIsNotIts) {
  on_ranks(3, [](ProcessGroup world) {
    auto mine = world.new_subgroups_by_enumeration({{0}, {2}});
    EXPECT_EQ(mine.contains_me(), world.rank() != 1);
    if (mine.contains_me()) {
      EXPECT_EQ(sum_over(mine, 5), 5);
    }
  });
}

TEST_P(Groups, GroupsOfGroupsCountInTheirParents) {
  on_ranks(4, [](ProcessGroup world) {
    auto upper = world.new_group({1, 2, 3});
    if (!upper.contains_me()) return;
    auto ends = upper.new_group({0, 2});
    EXPECT_EQ(ends.name(), "world/1/1");
    EXPECT_EQ(ends.global_ranks(), (Ranks{1, 3}));
    if (ends.contains_me()) {
      EXPECT_EQ(sum_over(ends, world.rank()), 4);
    }
  });
}

TEST_P(Groups, SeveralGroupsWorkAtOnce) {
  on_ranks(4, [](ProcessGroup world) {
    auto pairs = world.new_subgroups(2);
    auto across = world.new_subgroups_by_enumeration({{0, 2}, {1, 3}});
    std::vector<at::Tensor> tensors;
    std::vector<Work> works;
    for (int round = 0; round < 20; ++round) {
      for (const auto* group : {&world, &pairs, &across}) {
        tensors.push_back(at::full({1000}, world.rank() + 1.0, world.device()));
        works.push_back(group->all_reduce_async(tensors.back()));
      }
    }
    for (auto& work : works) work.wait();
    for (int round = 0; round < 20; ++round) {
      EXPECT_EQ(tensors[3 * round][7].item<float>(), 10);
      EXPECT_EQ(tensors[3 * round + 1][7].item<float>(), world.rank() < 2 ? 3 : 7);
      EXPECT_EQ(tensors[3 * round + 2][7].item<float>(), world.rank() % 2 == 0 ? 4 : 6);
    }
  });
}

TEST_P(Groups, SenselessGroupsAreRefusedAndTheParentGoesOn) {
  on_ranks(2, [](ProcessGroup world) {
    expect_error<UsageError>([&] { world.new_group({}); }, "at least one rank");
    expect_error<UsageError>([&] { world.new_group({0, 0}); }, "rank 0 is listed twice");
    expect_error<UsageError>([&] { world.new_group({0, 2}); }, "rank 2", "0 to 1");
    expect_error<UsageError>([&] { world.new_group({0}, {.backend = "pigeons"}); }, "pigeons", "threads");
    expect_error<UsageError>([&] { world.new_group({0}, {.timeout = 0ms}); }, "0 ms");
    expect_error<UsageError>([&] { world.new_subgroups_by_enumeration({}); }, "the list of groups is empty");
    expect_error<UsageError>([&] { world.new_subgroups_by_enumeration({{0, 1}, {1}}); }, "rank 1 is in two groups");
    EXPECT_EQ(sum_over(world, 1), 2);
  });
}

TEST_P(Groups, AGroupHasItsOwnTimeOut) {
  on_ranks(2, [](ProcessGroup world) {
    auto group = world.new_group({0, 1}, {.timeout = 1234ms});
    EXPECT_EQ(group.timeout(), 1234ms);
    EXPECT_EQ(group.backend_name(), world.backend_name());
    EXPECT_EQ(world.new_group({0, 1}).timeout(), world.timeout());
  });
}

TEST_P(Groups, AShortTimeOutOfAGroupIsNotThatOfMeetingToMakeIt) {
  on_ranks(2, [](ProcessGroup world) {
    if (world.rank() == 1) std::this_thread::sleep_for(700ms);  // what is tested is that it may come so late
    auto group = world.new_group({0}, {.timeout = 300ms});
    EXPECT_EQ(group.timeout(), 300ms);
    EXPECT_EQ(sum_over(world, 1), 2);
  });
}

TEST_P(Groups, DestroyEndsOneGroupAndNotTheOthers) {
  on_ranks(2, [](ProcessGroup world) {
    auto group = world.new_group({0, 1});
    auto copy = group;
    auto tensor = at::ones({4}, world.device());
    auto work = group.all_reduce_async(tensor);
    group.destroy();
    work.wait();
    EXPECT_EQ(tensor[0].item<float>(), 2) << "what was pending is done";
    expect_error<UsageError>([&] { copy.barrier(); }, "world/1", "destroyed");
    expect_error<UsageError>([&] { copy.new_group({0}); }, "destroyed");
    expect_error<UsageError>([&] { copy.synchronize(); }, "destroyed");
    expect_error<UsageError>([&] { copy.abort("no reason"); }, "destroyed");
    EXPECT_NO_THROW(group.destroy()) << "once more changes nothing";
    EXPECT_EQ(sum_over(world, 1), 2);
  });
}

TEST_P(Groups, AFailureInOneGroupLeavesTheOthers) {
  on_ranks(2, [](ProcessGroup world) {
    auto group = world.new_group({0, 1});
    if (world.rank() == 0) group.abort("this was enough");
    expect_error<PeerError>([&] { group.barrier(); }, "barrier", "rank 0 gave up: this was enough");
    EXPECT_EQ(sum_over(world, 1), 2);
  });
}

/// Calls on groups that come and go, the same on every rank, each compared with what its members must get.
class RandomCalls {
 public:
  RandomCalls(ProcessGroup world, unsigned seed) : world_(world), random_(seed), groups_{world} {}

  void make(int number) {
    if (below(12) == 0) return change_groups();
    auto& group = groups_[below(static_cast<int>(groups_.size()))];
    int root = below(group.size());
    int64_t elements = below(below(6) == 0 ? 40000 : 50);
    int kind = below(6);
    if (!group.contains_me()) return;
    auto value = [&](int global_rank) { return static_cast<double>(number % 97 + 3 * global_rank); };
    double mine = value(world_.rank());
    double sum = 0;
    for (int rank : group.global_ranks()) sum += value(rank);
    const auto doubles = at::TensorOptions(at::kDouble).device(group.device());
    auto tensor = at::full({elements}, mine, doubles);
    switch (kind) {
      case 0:
        group.all_reduce(tensor);
        return expect(tensor, sum, number);
      case 1:
        pending_.push_back({group.all_reduce_async(tensor), tensor, sum, number});
        return pending_.size() > 10 ? finish() : void();
      case 2:
        group.broadcast(tensor, root);
        return expect(tensor, value(group.global_rank(root)), number);
      case 3: {
        auto all = at::empty({group.size() * elements}, doubles);
        group.all_gather(all, tensor);
        for (int rank = 0; rank < group.size(); ++rank)
          expect(all.narrow(0, rank * elements, elements), value(group.global_rank(rank)), number);
        return;
      }
      case 4: {
        if (group.size() == 1) return;
        auto received = at::empty({elements}, doubles);
        int next = (group.rank() + 1) % group.size();
        int previous = (group.rank() + group.size() - 1) % group.size();
        auto sent = group.send_async(tensor, next, static_cast<uint32_t>(number % 3));
        group.recv(received, previous, static_cast<uint32_t>(number % 3));
        sent.wait();
        return expect(received, value(group.global_rank(previous)), number);
      }
      default:
        EXPECT_EQ(group.broadcast_object(static_cast<int64_t>(mine), root).toInt(),
                  static_cast<int64_t>(value(group.global_rank(root))));
    }
  }

  void finish() {
    for (auto& [work, tensor, expected, number] : pending_) {
      work.wait();
      expect(tensor, expected, number);
    }
    pending_.clear();
  }

 private:
  struct Pending {
    Work work;
    at::Tensor tensor;
    double expected;
    int number;
  };

  int below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }

  static void expect(const at::Tensor& tensor, double value, int number) {
    EXPECT_TRUE(at::equal(tensor, at::full_like(tensor, value))) << "call " << number;
  }

  void change_groups() {
    finish();
    if (groups_.size() > 5) {
      size_t gone = 1 + below(static_cast<int>(groups_.size()) - 1);
      if (below(2) == 0) groups_[gone].destroy();
      groups_.erase(groups_.begin() + gone);
    }
    std::vector<int> ranks;
    for (int rank = 0; rank < world_.size(); ++rank)
      if (below(2) == 0) ranks.push_back(rank);
    if (ranks.empty()) ranks.push_back(below(world_.size()));
    groups_.push_back(world_.new_group(ranks));
  }

  const ProcessGroup world_;
  std::mt19937 random_;
  std::vector<ProcessGroup> groups_;
  std::vector<Pending> pending_;
};

TEST_P(Groups, RandomCallsOnRandomGroupsComeOutRight) {
  const char* count = std::getenv("LOCKSTEP_TEST_RANDOM_CALLS");
  int calls = count ? std::atoi(count) : 150;
  for (int size : world_sizes({2, 3, 5})) {
    on_ranks(size, [&](ProcessGroup world) {
      RandomCalls random(world, 20261115 + static_cast<unsigned>(size));
      for (int number = 0; number < calls; ++number) random.make(number);
      random.finish();
    });
  }
}

std::vector<std::string> backends_of_groups() {
  auto backends = backends_under_test();
#ifdef LOCKSTEP_HAVE_NCCL
  if (ranks_are_processes()) backends.insert(backends.end(), {"nccl", "cpu:shm,cuda:nccl"});
#endif
  return backends;
}

INSTANTIATE_TEST_SUITE_P(Backends, Groups, testing::ValuesIn(backends_of_groups()), [](const auto& info) {
  return info.param.find(',') == std::string::npos ? info.param : "both";
});

#ifdef LOCKSTEP_HAVE_GLOO
TEST(Groups, GroupsMayHaveDifferentBackends) {
  run_threads(3,
              [](ProcessGroup world) {
                auto quick = world.new_group({0, 2}, {.backend = "threads"});
                EXPECT_EQ(world.backend_name(), "gloo");
                EXPECT_EQ(quick.backend_name(), "threads");
                if (quick.contains_me()) {
                  EXPECT_EQ(sum_over(quick, world.rank() + 1), 4);
                }
                EXPECT_EQ(sum_over(world, 1), 3);
              },
              {.backend = "gloo", .timeout = 60s});
}
#endif

TEST(GroupLayout, KnowsWhoIsWhere) {
  GroupLayout layout(4, 6, 3);
  EXPECT_EQ(layout.group_count(), 2);
  EXPECT_EQ(layout.group_rank(), 1);
  EXPECT_EQ(layout.local_group_rank(), 1);
  EXPECT_EQ(layout.group_rank_base(), 3);
  EXPECT_EQ(layout.group(), (Ranks{3, 4, 5}));
  EXPECT_EQ(layout.across(), (Ranks{1, 4}));
  EXPECT_EQ(layout.groups(), (std::vector<Ranks>{{0, 1, 2}, {3, 4, 5}}));
  EXPECT_EQ(layout.groups_across(), (std::vector<Ranks>{{0, 3}, {1, 4}, {2, 5}}));
}

TEST(GroupLayout, RefusesWhatDoesNotDivide) {
  expect_error<UsageError>([] { GroupLayout(0, 6, 4); }, "groups of 4", "6 ranks");
  expect_error<UsageError>([] { GroupLayout(0, 6, 0); }, "groups of 0");
  expect_error<UsageError>([] { GroupLayout(6, 6, 3); }, "rank 6 of 6");
}

}  // namespace
}  // namespace lockstep
