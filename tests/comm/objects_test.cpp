#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <lockstep/error.h>
#include <lockstep/process_group.h>
#include <lockstep/run_threads.h>

#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

class Objects : public testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  void on_ranks(const std::function<void(ProcessGroup)>& body) {
    auto [backend, size] = GetParam();
    run_threads(size, body, {.backend = backend, .timeout = std::chrono::minutes(1)});
  }
};

// A dictionary with a string, a number and a tensor, another on every rank.
c10::IValue sample(int rank) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  dict.insert("name", std::string(rank * 1000, 'x') + "\0 and more");
  dict.insert("epoch", int64_t{rank});
  dict.insert("weights", at::arange(rank + 1, at::kFloat));
  return dict;
}

void expect_sample(const c10::IValue& object, int rank) {
  ASSERT_TRUE(object.isGenericDict());
  auto dict = object.toGenericDict();
  EXPECT_EQ(dict.at("name").toStringRef(), std::string(rank * 1000, 'x') + "\0 and more");
  EXPECT_EQ(dict.at("epoch").toInt(), rank);
  EXPECT_TRUE(at::equal(dict.at("weights").toTensor(), at::arange(rank + 1, at::kFloat)));
}

TEST_P(Objects, BroadcastGivesAllTheRootsObject) {
  on_ranks([](ProcessGroup world) {
    int root = world.size() - 1;
    expect_sample(world.broadcast_object(sample(world.rank()), root), root);
    EXPECT_EQ(world.broadcast_object(world.rank() == 0 ? "sgd" : "", 0).toStringRef(), "sgd");
    EXPECT_TRUE(world.broadcast_object(c10::IValue(), 0).isNone());
  });
}

TEST_P(Objects, AllGatherGivesAllEveryObject) {
  on_ranks([](ProcessGroup world) {
    auto all = world.all_gather_object(sample(world.rank()));
    ASSERT_EQ(static_cast<int>(all.size()), world.size());
    for (int rank = 0; rank < world.size(); ++rank) expect_sample(all[rank], rank);
  });
}

TEST_P(Objects, GatherGivesOneRankEveryObject) {
  on_ranks([](ProcessGroup world) {
    auto all = world.gather_object(sample(world.rank()), 0);
    ASSERT_EQ(static_cast<int>(all.size()), world.rank() == 0 ? world.size() : 0);
    for (size_t rank = 0; rank < all.size(); ++rank) expect_sample(all[rank], static_cast<int>(rank));
  });
}

TEST_P(Objects, ScatterGivesEveryRankItsOwn) {
  on_ranks([](ProcessGroup world) {
    std::vector<c10::IValue> objects;
    if (world.rank() == 0)
      for (int rank = 0; rank < world.size(); ++rank) objects.push_back(sample(rank));
    expect_sample(world.scatter_object(objects, 0), world.rank());
  });
}

TEST_P(Objects, SenselessArgumentsAreRefusedAndTheGroupGoesOn) {
  on_ranks([](ProcessGroup world) {
    expect_error<UsageError>([&] { world.broadcast_object(1, world.size()); }, "broadcast_object", "src");
    expect_error<UsageError>([&] { world.gather_object(1, -1); }, "gather_object", "dst is rank -1");
    if (world.rank() == 0)
      expect_error<UsageError>([&] { world.scatter_object({}, 0); }, "scatter_object", "0 objects",
                               std::to_string(world.size()));
    expect_sample(world.broadcast_object(sample(0), 0), 0);
  });
}

TEST_P(Objects, AnObjectThatCannotBeSentIsAnErrorOnAllRanksAndTheGroupGoesOn) {
  on_ranks([](ProcessGroup world) {
    const c10::IValue device = c10::Device("cpu");
    const auto mine = world.rank() == 0 ? device : c10::IValue(1);
    expect_error<UsageError>([&] { world.broadcast_object(mine, 0); }, "rank 0", "broadcast_object", "Device");
    expect_error<UsageError>([&] { world.all_gather_object(mine); }, "rank 0", "all_gather_object", "Device");
    if (world.rank() == 0)
      expect_error<UsageError>([&] { world.gather_object(mine, 0); }, "rank 0", "gather_object", "Device");
    else
      EXPECT_TRUE(world.gather_object(mine, 0).empty());
    std::vector<c10::IValue> all(world.size(), device);
    expect_error<UsageError>([&] { world.scatter_object(world.rank() == 0 ? all : std::vector<c10::IValue>(), 0); },
                             "rank 0", "scatter_object", "Device");
    expect_sample(world.broadcast_object(sample(0), 0), 0);
  });
}

TEST_P(Objects, AreSentToOneRank) {
  on_ranks([](ProcessGroup world) {
    const int me = world.rank();
    if (world.size() == 1) return;
    if (me == 0) {
      for (int rank = 1; rank < world.size(); ++rank) {
        world.send_object(sample(rank), rank, 3);
        world.send_object(std::string(), rank, 3);
      }
      expect_error<UsageError>([&] { world.send_object(sample(0), 0); }, "rank 0", "itself");
      expect_error<UsageError>([&] { world.send_object(sample(0), 9); }, "dst is rank 9");
    } else {
      EXPECT_EQ(world.recv_object(0, 3).toGenericDict().at("epoch").toInt(), me);
      EXPECT_EQ(world.recv_object(0, 3).toStringRef(), "");
    }
    // What cannot be sent is an error on both sides, and the group stays usable.
    if (me == 0)
      expect_error<UsageError>([&] { world.send_object(at::ones({2}).to_sparse(), 1); }, "rank 0", "send_object");
    if (me == 1) expect_error<UsageError>([&] { world.recv_object(0); }, "rank 0", "recv_object");
    world.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, Objects,
                         testing::Combine(testing::ValuesIn(backends_under_test()), testing::Values(1, 2, 3)),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::to_string(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace lockstep
