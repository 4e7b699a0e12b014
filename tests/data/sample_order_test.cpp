#include <lockstep/sample_order.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <numeric>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/data_loader.h>
#include <lockstep/distributed_sampler.h>
#include <lockstep/error.h>
#include <lockstep/group_loader.h>
#include <lockstep/logging.h>
#include <lockstep/run_threads.h>

#include "data/through_archive.h"
#include "support/messages.h"
#include "support/python.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::UnorderedElementsAreArray;
using Indices = std::vector<size_t>;

Indices drain(DistributedSampler& sampler) {
  Indices all;
  while (auto batch = sampler.next(3)) all.insert(all.end(), batch->begin(), batch->end());
  return all;
}

/// Epoch e begins with sample e.
SampleOrder rotated(size_t size) {
  return {"rotated", [=](int64_t epoch) {
            Indices indices(size);
            for (size_t i = 0; i < size; ++i) indices[i] = (i + static_cast<size_t>(epoch)) % size;
            return indices;
          }};
}

// --- the orders

TEST(SampleOrders, AreThoseOfPython) {
  const char* python = std::getenv("LOCKSTEP_TEST_PYTHON");
  if (!python || !*python) GTEST_SKIP() << "needs Python's torch: set LOCKSTEP_TEST_PYTHON";
  std::vector<std::string> cases;
  std::vector<Indices> drawn;
  const auto add = [&](const std::string& question, const SampleOrder& order, int64_t epoch) {
    cases.push_back(question);
    drawn.push_back(order(epoch));
  };
  for (const int64_t epoch : {0, 3})
    for (const bool replacement : {true, false}) {
      const auto words = std::to_string(5 + epoch) + (replacement ? " 1 " : " 0 ");
      for (const size_t count : {1, 31, 32, 33, 100, 250})
        add("random " + words + std::to_string(count) + " 100",
            random_order(100, {.num_samples = count, .replacement = replacement, .seed = 5}), epoch);
      for (const size_t count : {1, 3, 4})
        add("weighted " + words + std::to_string(count) + " 0.5 0 2 1e-3 7",
            weighted_order({0.5, 0, 2, 1e-3, 7}, {.num_samples = count, .replacement = replacement, .seed = 5}), epoch);
      add("subset " + std::to_string(5 + epoch) + " 9 4 7 1 30", subset_order({9, 4, 7, 1, 30}, {.seed = 5}), epoch);
    }
  const TemporaryFolder folder;
  const auto in = (folder.path() / "in").string(), out = (folder.path() / "out").string();
  {
    std::ofstream file(in);
    for (const auto& question : cases) file << question << '\n';
  }
  ASSERT_EQ(run_python(python, "data/sample_order_oracle.py", {}, {.in = in, .out = out}), 0);
  std::ifstream answers(out);
  for (size_t i = 0; i < cases.size(); ++i) {
    std::string line;
    ASSERT_TRUE(std::getline(answers, line)) << cases[i];
    std::istringstream numbers(line);
    EXPECT_EQ(drawn[i], Indices(std::istream_iterator<size_t>(numbers), {})) << cases[i];
  }
}

TEST(SampleOrders, BalancingWeightsDrawAllClassesEquallyOften) {
  auto classes = torch::zeros({1000}, torch::kLong);
  classes.slice(0, 0, 20).fill_(1);
  classes.slice(0, 20, 25).fill_(7);
  const auto weights = balancing_weights(classes);
  EXPECT_EQ(weights[0], 1.0 / 20);
  EXPECT_EQ(weights[22], 1.0 / 5);
  std::map<int64_t, int> counts;
  for (size_t sample : weighted_order(weights, {.num_samples = 6000, .seed = 1})(0))
    ++counts[classes[static_cast<int64_t>(sample)].item<int64_t>()];
  for (int64_t number : {0, 1, 7}) EXPECT_NEAR(counts[number], 2000, 150) << "class " << number;
}

TEST(SampleOrders, StepsHaveSamplesOfSimilarLengths) {
  std::vector<int64_t> lengths(1003);
  for (size_t i = 0; i < lengths.size(); ++i) lengths[i] = 1 + static_cast<int64_t>(i * 7919 % 1003);
  const auto order = similar_length_order(lengths, {.samples_per_step = 10, .window_steps = 25, .seed = 3});
  for (const int64_t epoch : {0, 1}) {
    const auto indices = order(epoch);
    Indices all(lengths.size());
    std::iota(all.begin(), all.end(), 0);
    EXPECT_THAT(indices, UnorderedElementsAreArray(all)) << "every sample once";
    int64_t spread = 0;
    std::vector<int64_t> first_lengths;
    for (size_t step = 0; step < 100; ++step) {
      const auto in_step = [&](auto chosen) {
        const auto first = indices.begin() + static_cast<std::ptrdiff_t>(10 * step);
        return lengths[*chosen(first, first + 10, [&](size_t a, size_t b) { return lengths[a] < lengths[b]; })];
      };
      first_lengths.push_back(lengths[indices[10 * step]]);
      spread += in_step([](auto... a) { return std::max_element(a...); }) -
                in_step([](auto... a) { return std::min_element(a...); });
    }
    EXPECT_LT(spread / 100, 60) << "in a random order it would be about 820";
    EXPECT_FALSE(std::is_sorted(first_lengths.begin(), first_lengths.begin() + 25)) << "the steps are shuffled";
  }
  EXPECT_NE(order(0), order(1));
  EXPECT_EQ(order(1), order(1));
}

TEST(SampleOrders, RefuseWhatHasNoMeaning) {
  const auto refused = [](const auto& make) { return error_of<UsageError>(make); };
  EXPECT_THAT(refused([] { random_order(0); }), HasSubstr("random_order: the dataset has 0 samples"));
  EXPECT_THAT(refused([] { random_order(5, {.num_samples = 0}); }), HasSubstr("num_samples is 0"));
  EXPECT_THAT(refused([] { weighted_order({1, -2}); }), HasSubstr("weight 1 is -2"));
  EXPECT_THAT(refused([] { weighted_order({1, NAN}); }), HasSubstr("weight 1 is nan"));
  EXPECT_THAT(refused([] { weighted_order({0, 0}); }), HasSubstr("all weights are 0"));
  EXPECT_THAT(refused([] { weighted_order({1, 0, 1}, {.replacement = false}); }), HasSubstr("only 2 have a weight"));
  EXPECT_THAT(refused([] { subset_order({}); }), HasSubstr("no samples"));
  EXPECT_THAT(refused([] { similar_length_order({1, 2}, {}); }), HasSubstr("samples_per_step is 0"));
  EXPECT_THAT(refused([] { similar_length_order({1, 0}, {.samples_per_step = 1}); }), HasSubstr("length 1 is 0"));
  EXPECT_THAT(refused([] { SampleOrder("", [](int64_t) { return Indices(); }); }), HasSubstr("the name is empty"));
}

// --- the sampler

TEST(SamplerWithOrder, DividesTheOrderBetweenTheRanks) {
  const SampleOrder order("by hand", [](int64_t epoch) { return epoch == 0 ? Indices{4, 4, 0, 9, 2} : Indices{7, 8}; });
  const auto indices = [&](int rank, int64_t epoch, Tail tail) {
    DistributedSampler sampler(order, 10, rank, 2, {.tail = tail});
    sampler.set_epoch(epoch);
    sampler.reset();
    return drain(sampler);
  };
  EXPECT_EQ(indices(0, 0, Tail::kPad), (Indices{4, 0, 2}));
  EXPECT_EQ(indices(1, 0, Tail::kPad), (Indices{4, 9, 4})) << "the order repeats";
  EXPECT_EQ(indices(1, 0, Tail::kDrop), (Indices{4, 9}));
  EXPECT_EQ(indices(1, 0, Tail::kExact), (Indices{4, 9}));
  EXPECT_EQ(indices(0, 1, Tail::kPad), (Indices{7})) << "epochs may differ in size";
  EXPECT_EQ(indices(1, 1, Tail::kPad), (Indices{8}));
}

TEST(SamplerWithOrder, RefusesSamplesThatTheDatasetDoesNotHave) {
  const auto make = [](Indices indices, Tail tail) {
    return error_of<UsageError>([&] {
      DistributedSampler(SampleOrder("by hand", [=](int64_t) { return indices; }), 10, 0, 3, {.tail = tail});
    });
  };
  EXPECT_THAT(make({1, 10}, Tail::kPad), HasSubstr("the order 'by hand' has sample 10 in epoch 0"));
  EXPECT_THAT(make({}, Tail::kPad), HasSubstr("the order 'by hand' has 0 samples"));
  EXPECT_THAT(make({1, 2}, Tail::kDrop), HasSubstr("2 samples among 3 replicas"));
  DistributedSampler sampler(rotated(10), 10, 0, 3);
  EXPECT_THAT(error_of<UsageError>([&] { sampler.reset(11); }), HasSubstr("is for a dataset of 10"));
}

TEST(SamplerWithOrder, ContinuesInsideOfAnEpochOnAnyNumberOfRanks) {
  const auto order = random_order(20, {.num_samples = 60, .seed = 3});
  for (const int replicas_after : {2, 3, 1}) {
    std::vector<DistributedSampler> before;
    std::multiset<size_t> seen;
    for (int rank = 0; rank < 2; ++rank) {
      before.emplace_back(order, 20, rank, 2);
      before.back().set_epoch(4);
      before.back().reset();
      const auto taken = before.back().next(15);
      seen.insert(taken->begin(), taken->end());
    }
    for (int rank = 0; rank < replicas_after; ++rank) {
      DistributedSampler after(order, 20, rank, replicas_after);
      through_archive(before[static_cast<size_t>(rank % 2)], after);
      EXPECT_EQ(after.epoch(), 4);
      after.reset();
      for (size_t sample : drain(after)) seen.insert(sample);
    }
    const auto all = order(4);
    EXPECT_EQ(seen, std::multiset<size_t>(all.begin(), all.end())) << replicas_after << " ranks";
  }
}

TEST(SamplerWithOrder, RefusesThePositionOfAnotherOrder) {
  DistributedSampler saved(weighted_order({1, 2, 3, 4}, {.seed = 1}), 4, 0, 1);
  saved.reset();
  saved.next(2);
  const auto refusal = [&](DistributedSampler sampler) {
    return error_of<UsageError>([&] { through_archive(saved, sampler); });
  };
  EXPECT_EQ(refusal({weighted_order({1, 2, 3, 4}, {.seed = 1}), 4, 0, 1}), "no such error");
  EXPECT_THAT(refusal({weighted_order({1, 2, 3, 5}, {.seed = 1}), 4, 0, 1}), HasSubstr("resume with the same order"));
  EXPECT_THAT(refusal({weighted_order({1, 2, 3, 4}, {.seed = 2}), 4, 0, 1}), HasSubstr("seed 1', this sampler has"));
  EXPECT_THAT(refusal({4, 0, 1}), HasSubstr("this sampler has no order"));
  saved.next(2);  // the epoch is over: any order may begin the next one
  EXPECT_EQ(refusal({4, 0, 1}), "no such error");
}

TEST(SamplerWithOrder, WarnsOnlyIfTheOrderDependsOnTheEpoch) {
  std::vector<std::string> warnings;
  set_log_sink([&](LogLevel, const std::string& line) { warnings.push_back(line); });
  const SampleOrder constant("constant", [](int64_t) { return Indices{1, 2}; });
  for (const auto& order : {constant, rotated(4)}) {
    DistributedSampler sampler(order, 4, 0, 1);
    for (int epoch = 0; epoch < 3; ++epoch) sampler.reset();
  }
  set_log_sink({});
  EXPECT_THAT(warnings, ElementsAre(HasSubstr("call sampler.set_epoch(epoch)")));
}

// --- the loaders

struct Squares {
  size_t size() const { return 12; }
  torch::Tensor get(size_t index) const { return torch::tensor(static_cast<int64_t>(index * index)); }
};

std::vector<std::vector<int64_t>> numbers_of(auto& loader) {
  std::vector<std::vector<int64_t>> batches;
  for (auto& batch : loader)
    batches.emplace_back(batch.template data_ptr<int64_t>(), batch.template data_ptr<int64_t>() + batch.numel());
  return batches;
}

TEST(LoaderWithOrder, DeliversTheOrder) {
  const SampleOrder order("by hand", [](int64_t) { return Indices{3, 3, 11, 0, 5}; });
  DistributedSampler sampler(order, 12, 0, 1, {.tail = Tail::kExact});
  DataLoader loader(Squares(), sampler, {.batch_size = 2, .num_workers = 2});
  EXPECT_EQ(loader.size(), 3);
  EXPECT_THAT(numbers_of(loader), ElementsAre(ElementsAre(9, 9), ElementsAre(121, 0), ElementsAre(25)));
}

TEST(LoaderWithOrder, GroupsReadTheSameBatches) {
  run_threads(4, [](const ProcessGroup& world) {
    const auto order = weighted_order(std::vector<double>(12, 1), {.num_samples = 24, .seed = 2});
    DistributedSampler sampler(order, Squares(), world), same(order, Squares(), world);
    sampler.set_epoch(3);
    same.set_epoch(3);
    DataLoader alone(Squares(), same, {.batch_size = 3});
    GroupLoader loader([] { return Squares(); }, sampler, {.scatter = world.new_subgroups(2)}, {.batch_size = 3});
    const auto expected = numbers_of(alone);
    EXPECT_EQ(expected.size(), 2U);
    EXPECT_EQ(numbers_of(loader), expected);
  });
}

}  // namespace
}  // namespace lockstep
