#include <lockstep/group_loader.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/error.h>
#include <lockstep/run_threads.h>

#include "data/through_archive.h"
#include "support/log_lines.h"

namespace lockstep {
namespace {

using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using torch::data::Example;

// Sample i is i and a number drawn for it; the last sample of all cannot be read.
struct Drawn {
  Example<> get(size_t index, at::Generator& random) {
    if (index + 1 == torn) throw std::runtime_error("a page is torn");
    return {torch::tensor(static_cast<double>(index)), torch::rand({3}, random)};
  }
  torch::optional<size_t> size() const { return samples; }
  size_t samples = 24;
  size_t torn = 0;
};

template <class Loader>
std::vector<at::Tensor> batches_of(Loader& loader) {
  std::vector<at::Tensor> all;
  for (auto& batch : loader) all.push_back(torch::cat({batch.data.unsqueeze(1), batch.target.to(torch::kDouble)}, 1));
  return all;
}

void expect_equal(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(torch::equal(got[i], expected[i])) << i;
}

// Six ranks in two groups of three, and the first of each.
struct SixRanks {
  explicit SixRanks(const ProcessGroup& world) : three(world.new_subgroups(3)), firsts(world.new_group({0, 3})) {}
  ProcessGroup three, firsts;
};

std::vector<std::string> errors_of(int ranks, const std::function<void(ProcessGroup)>& body) {
  std::vector<std::string> errors(static_cast<size_t>(ranks));
  run_threads(ranks, [&](ProcessGroup world) {
    try {
      body(world);
      errors[static_cast<size_t>(world.rank())] = "no error";
    } catch (const Error& error) {
      errors[static_cast<size_t>(world.rank())] = error.what();
    }
  });
  return errors;
}

const DataLoaderOptions kBatches{.batch_size = 3};

TEST(GroupLoader, ScattersWhatEachRankWouldHaveRead) {
  const LogLines log;
  std::atomic<int> readers = 0;
  run_threads(6, [&](ProcessGroup world) {
    const SixRanks ranks(world);
    DistributedSampler sampler(24, world, {.seed = 2}), alone(24, world, {.seed = 2});
    GroupLoader loader([&] { return ++readers, Drawn(); }, sampler, {.scatter = ranks.three}, kBatches);
    DataLoader own(Drawn(), alone, kBatches);
    EXPECT_EQ(loader.size(), 2);
    for (int epoch : {0, 1}) {
      sampler.set_epoch(epoch);
      alone.set_epoch(epoch);
      expect_equal(batches_of(loader), batches_of(own));
      EXPECT_EQ(sampler.position(), 4u);
    }
  });
  EXPECT_EQ(readers, 2);
  EXPECT_TRUE(log.lines().empty()) << log.lines().front();
}

TEST(GroupLoader, BroadcastsToThoseWhoShareAModel) {
  std::atomic<int> readers = 0;
  run_threads(6, [&](ProcessGroup world) {
    const SixRanks ranks(world);
    const int replica = world.rank() / 3;
    DistributedSampler sampler(24, replica, 2), alone(24, replica, 2);
    GroupLoader loader([&] { return ++readers, Drawn(); }, sampler, {.broadcast = ranks.three}, kBatches);
    DataLoader own(Drawn(), alone, kBatches);
    expect_equal(batches_of(loader), batches_of(own));
  });
  EXPECT_EQ(readers, 2);
}

TEST(GroupLoader, ScattersThenBroadcastsFromOneReader) {
  std::atomic<int> readers = 0;
  run_threads(6, [&](ProcessGroup world) {
    const SixRanks ranks(world);
    const int replica = world.rank() / 3;
    DistributedSampler sampler(24, replica, 2), alone(24, replica, 2);
    GroupLoader loader([&] { return ++readers, Drawn(); }, sampler, {.scatter = ranks.firsts, .broadcast = ranks.three},
                       kBatches);
    DataLoader own(Drawn(), alone, kBatches);
    for (int epoch : {0, 1}) {
      sampler.set_epoch(epoch);
      alone.set_epoch(epoch);
      expect_equal(batches_of(loader), batches_of(own));
    }
  });
  EXPECT_EQ(readers, 1);
}

TEST(GroupLoader, ReadsForItselfWithoutGroups) {
  DistributedSampler sampler(24, 0, 1), alone(24, 0, 1);
  GroupLoader loader([] { return Drawn(); }, sampler, {}, kBatches);
  DataLoader own(Drawn(), alone, kBatches);
  expect_equal(batches_of(loader), batches_of(own));
  EXPECT_GT(loader.waited().count(), 0);
}

TEST(GroupLoader, ContinuesAfterTheBatchThatTheLoopHad) {
  run_threads(2, [&](ProcessGroup world) {
    DistributedSampler sampler(24, world), second(24, world);
    GroupLoader loader([] { return Drawn(); }, sampler, {.scatter = world}, kBatches);
    std::vector<at::Tensor> rest;
    size_t had = 0;
    sampler.set_epoch(5);
    for (auto& batch : loader) {
      if (++had == 1) through_archive(sampler, second);
      if (had > 1) rest.push_back(torch::cat({batch.data.unsqueeze(1), batch.target.to(torch::kDouble)}, 1));
    }
    ASSERT_EQ(rest.size(), 3u);
    GroupLoader resumed([] { return Drawn(); }, second, {.scatter = world}, kBatches);
    second.set_epoch(5);
    expect_equal(batches_of(resumed), rest);
    EXPECT_EQ(batches_of(resumed).size(), 4u) << "the loop after that has a whole epoch";
  });
}

TEST(GroupLoader, EndsAnEpochWhoseLastBatchIsLeftOut) {
  run_threads(2, [&](ProcessGroup world) {
    DistributedSampler sampler(20, world);
    GroupLoader loader([] { return Drawn{.samples = 20}; }, sampler, {.scatter = world},
                       {.batch_size = 4, .drop_last = true});
    EXPECT_EQ(batches_of(loader).size(), 2u);
    EXPECT_EQ(sampler.position(), 10u);
  });
}

TEST(GroupLoader, DeliversTensorsOfAnyKindOnADevice) {
  struct Halves {
    at::Tensor get(size_t index) { return torch::full({2}, double(index), torch::kHalf); }
  };
  run_threads(2, [&](ProcessGroup world) {
    DistributedSampler sampler(4, world, {.shuffle = false});
    GroupLoader loader([] { return Halves(); }, sampler, {.scatter = world},
                       {.batch_size = 2, .device = torch::Device("meta")});
    for (at::Tensor& batch : loader) EXPECT_TRUE(batch.is_meta() && batch.scalar_type() == torch::kHalf);
    const auto largest = [](std::vector<at::Tensor> samples) { return samples.back(); };
    GroupLoader collated([] { return Halves(); }, sampler, {.scatter = world}, largest, {.batch_size = 2});
    for (at::Tensor& batch : collated) EXPECT_EQ(batch[0].item<int>(), 2 + world.rank());
  });
}

TEST(GroupLoader, ThrowsOnAllRanksWhatGoesWrongWhereItReads) {
  std::atomic<int> delivered = 0;
  EXPECT_THAT(errors_of(6,
                        [&](ProcessGroup world) {
                          const SixRanks ranks(world);
                          DistributedSampler sampler(24, world.rank() / 3, 2, {.shuffle = false});
                          GroupLoader loader([] { return Drawn{.torn = 24}; }, sampler,
                                             {.scatter = ranks.firsts, .broadcast = ranks.three}, kBatches);
                          for ([[maybe_unused]] auto& batch : loader) ++delivered;
                        }),
              Each(AllOf(HasSubstr("rank 0: GroupLoader: cannot read a batch: rank 1: DataLoader: epoch 0"),
                         HasSubstr("sample 23: a page is torn"))));
  EXPECT_EQ(delivered, 18) << "three batches on each rank";

  EXPECT_THAT(errors_of(3,
                        [&](ProcessGroup world) {
                          const auto open = []() -> Drawn { throw std::runtime_error("not mounted"); };
                          GroupLoader loader(open, DistributedSampler(24, world), {.scatter = world}, kBatches);
                        }),
              Each("rank 0: GroupLoader: cannot open the dataset: not mounted"));
}

TEST(GroupLoader, RefusesSamplersThatDoNotFit) {
  const auto with = [](auto make_sampler, bool broadcasts) {
    return errors_of(2, [=](ProcessGroup world) {
      ReadingGroups groups;
      (broadcasts ? groups.broadcast : groups.scatter) = world;
      GroupLoader loader([] { return Drawn(); }, make_sampler(world), groups, kBatches);
      for ([[maybe_unused]] auto& batch : loader) {
      }
    });
  };
  EXPECT_THAT(with([](auto world) { return DistributedSampler(24, world); }, true),
              Each(AllOf(HasSubstr("ranks of the group that broadcasts differ: rank 0 has"), HasSubstr("rank 1 has"))));
  EXPECT_THAT(with([](auto world) { return DistributedSampler(24, world, {.seed = uint64_t(world.rank())}); }, false),
              Each(HasSubstr("that scatters differ")));
  EXPECT_THAT(with([](auto world) { return DistributedSampler(23, world); }, false),
              Each(HasSubstr("the sampler was created for 23 samples, but the dataset has 24")));
  EXPECT_THAT(errors_of(2,
                        [](ProcessGroup world) {
                          DistributedSampler sampler(7, world, {.tail = Tail::kExact});
                          GroupLoader loader([] { return Drawn{.samples = 7}; }, sampler, {.scatter = world}, kBatches);
                          for ([[maybe_unused]] auto& batch : loader) {
                          }
                        }),
              Each(HasSubstr("rank 0 has 2 batches per epoch, but rank 1 has 1; use Tail::kPad")));

  // With both kinds of groups, ranks that have nothing to do with what is wrong hear of it, too.
  const auto among_six = [](auto make_sampler) {
    return errors_of(6, [=](ProcessGroup world) {
      const SixRanks ranks(world);
      const ReadingGroups groups{.scatter = ranks.firsts, .broadcast = ranks.three};
      GroupLoader loader([] { return Drawn(); }, make_sampler(world), groups, kBatches);
    });
  };
  EXPECT_THAT(
      among_six([](auto world) { return DistributedSampler(24, world.rank() / 3, 2, {.seed = world.rank() / 3u}); }),
      Each(HasSubstr("that scatters differ")));
  EXPECT_THAT(
      among_six([](auto world) { return DistributedSampler(24, world.rank() / 3, 2, {.seed = world.rank() / 5u}); }),
      Each(HasSubstr("that broadcasts differ")));
  EXPECT_THAT(errors_of(4,
                        [](ProcessGroup world) {
                          const auto two = world.new_subgroups(2);
                          GroupLoader loader([] { return Drawn(); }, DistributedSampler(24, world.rank() / 2, 2),
                                             {.scatter = world, .broadcast = two}, kBatches);
                        }),
              Each(HasSubstr("only rank 0 of each group")));
}

TEST(GroupLoader, RefusesARankInAnotherEpoch) {
  const auto errors = errors_of(2, [](ProcessGroup world) {
    DistributedSampler sampler(24, world);
    GroupLoader loader([] { return Drawn(); }, sampler, {.scatter = world}, kBatches);
    if (world.rank() == 0) sampler.set_epoch(3);
    for ([[maybe_unused]] auto& batch : loader) {
    }
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("samplers"), HasSubstr("rank 0 has epoch 3, position 0"),
                                 HasSubstr("rank 1 has epoch 0, position 0"))));
}

TEST(GroupLoader, TellsAllRanksOfBothKindsOfGroupsThatOneIsInAnotherEpoch) {
  for (int astray : {0, 3, 5})
    EXPECT_THAT(errors_of(6,
                          [&](ProcessGroup world) {
                            const SixRanks ranks(world);
                            DistributedSampler sampler(24, world.rank() / 3, 2);
                            GroupLoader loader([] { return Drawn(); }, sampler,
                                               {.scatter = ranks.firsts, .broadcast = ranks.three}, kBatches);
                            if (world.rank() == astray) sampler.set_epoch(3);
                            for ([[maybe_unused]] auto& batch : loader) {
                            }
                          }),
                Each(AllOf(HasSubstr("epoch 3, position 0"), HasSubstr("epoch 0, position 0"))))
        << "rank " << astray;
}

TEST(GroupLoader, RefusesTwoLoopsAtATime) {
  DistributedSampler sampler(24, 0, 1, {.shuffle = false});
  GroupLoader loader([] { return Drawn(); }, sampler, {}, kBatches);
  auto first = loader.begin();
  auto second = loader.begin();
  EXPECT_THROW(++first, UsageError);
  ++second;
  EXPECT_EQ(second->data[0].item<int>(), 3) << "a batch was skipped";
}

}  // namespace
}  // namespace lockstep
