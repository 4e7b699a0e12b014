#include <lockstep/subset.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/data_loader.h>
#include <lockstep/distributed_sampler.h>
#include <lockstep/error.h>

#include "support/messages.h"
#include "support/python.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using testing::ElementsAre;
using Indices = std::vector<size_t>;

/// Sample i is the number 100 + i.
struct TenNumbers {
  size_t size() const { return count; }
  int64_t get(size_t index) const { return 100 + static_cast<int64_t>(index); }
  size_t count = 10;
};

std::vector<int64_t> values_in(const at::Tensor& batch) {
  return {batch.data_ptr<int64_t>(), batch.data_ptr<int64_t>() + batch.numel()};
}

std::vector<Indices> indices_of(const std::vector<Subset<TenNumbers>>& parts) {
  std::vector<Indices> indices;
  for (const auto& part : parts) indices.push_back(part.indices());
  return indices;
}

std::vector<size_t> sizes_of(size_t dataset_size, const std::vector<PartSize>& sizes) {
  std::vector<size_t> counts;
  for (const auto& part : random_split(TenNumbers{dataset_size}, sizes)) counts.push_back(part.size());
  return counts;
}

// --- Subset

TEST(Subset, HasTheSamplesOfItsIndicesInTheirOrder) {
  Subset subset(TenNumbers(), {7, 0, 7, 3});
  EXPECT_EQ(subset.size(), 4);
  EXPECT_THAT(subset.indices(), ElementsAre(7, 0, 7, 3));
  std::vector<int64_t> samples;
  for (size_t i = 0; i < subset.size(); ++i) samples.push_back(subset.get(i));
  EXPECT_THAT(samples, ElementsAre(107, 100, 107, 103));
}

TEST(Subset, OfASubsetHasTheSamplesOfTheDataset) {
  Subset outer(Subset(TenNumbers(), {9, 8, 7, 6}), {3, 1});
  EXPECT_EQ(outer.get(0), 106);
  EXPECT_EQ(outer.get(1), 108);
}

TEST(Subset, IsEvaluatedExactlyAndInOrderOverAnyNumberOfRanks) {
  const Indices chosen = {5, 2, 9, 2, 0, 7, 1};
  for (const int ranks : {1, 2, 3, 4, 7, 9}) {
    std::vector<std::vector<int64_t>> of_ranks;
    for (int rank = 0; rank < ranks; ++rank) {
      Subset subset(TenNumbers(), chosen);
      DistributedSampler sampler(subset.size(), rank, ranks, {.shuffle = false, .tail = Tail::kExact});
      DataLoader loader(subset, sampler, {.batch_size = 2, .num_workers = 2});
      auto& mine = of_ranks.emplace_back();
      for (auto& batch : loader)
        for (const int64_t number : values_in(batch)) mine.push_back(number);
    }
    std::vector<int64_t> merged;  // the ranks take turns
    for (size_t i = 0; i < chosen.size(); ++i)
      merged.push_back(of_ranks[i % static_cast<size_t>(ranks)].at(i / static_cast<size_t>(ranks)));
    EXPECT_THAT(merged, ElementsAre(105, 102, 109, 102, 100, 107, 101)) << ranks << " ranks";
    size_t delivered = 0;
    for (const auto& mine : of_ranks) delivered += mine.size();
    EXPECT_EQ(delivered, chosen.size()) << ranks << " ranks";
  }
}

struct WithGenerator {
  size_t size() const { return 10; }
  at::Tensor get(size_t index, at::Generator& random) const {
    return torch::stack(
        {torch::tensor(static_cast<int64_t>(index)), torch::randint(1 << 30, {}, random, torch::kLong)});
  }
};

TEST(Subset, PassesTheGenerator) {
  const auto epoch = [](int workers) {
    Subset subset(WithGenerator(), {4, 6, 8});
    DistributedSampler sampler(subset.size(), 0, 1, {.shuffle = false, .seed = 3});
    DataLoader loader(subset, sampler, {.batch_size = 3, .num_workers = workers});
    at::Tensor all;
    for (auto& batch : loader) all = batch;
    return all;
  };
  EXPECT_THAT(values_in(epoch(0).select(1, 0).contiguous()), ElementsAre(4, 6, 8));
  EXPECT_TRUE(epoch(0).equal(epoch(2)));
}

struct WithGather {
  size_t size() const { return 10; }
  at::Tensor gather(torch::ArrayRef<size_t> indices) const {
    at::Tensor all = torch::empty({static_cast<int64_t>(indices.size())}, torch::kLong);
    std::copy(indices.begin(), indices.end(), all.data_ptr<int64_t>());
    return all;
  }
};

struct WithBatches : torch::data::datasets::BatchDataset<WithBatches, at::Tensor> {
  at::Tensor get_batch(torch::ArrayRef<size_t> indices) override { return WithGather().gather(indices); }
  torch::optional<size_t> size() const override { return 10; }
};

template <class Data>
std::vector<int64_t> batch_of(Data dataset) {
  DistributedSampler sampler(dataset.size(), 0, 1, {.shuffle = false});
  DataLoader loader(dataset, sampler, {.batch_size = static_cast<int64_t>(dataset.size())});
  std::vector<int64_t> all;
  for (auto& batch : loader)
    for (const int64_t number : values_in(batch)) all.push_back(number);
  return all;
}

TEST(Subset, ReadsBatchesOfDatasetsThatMakeThem) {
  EXPECT_THAT(batch_of(Subset(WithGather(), {8, 1, 5})), ElementsAre(8, 1, 5));
  EXPECT_THAT(batch_of(Subset(WithBatches(), {8, 1, 5})), ElementsAre(8, 1, 5));
}

TEST(Subset, SharesADatasetBehindAPointer) {
  const auto dataset = std::make_shared<TenNumbers>();
  const Subset subset(dataset, {1, 2});
  EXPECT_EQ(subset.dataset().get(), dataset.get());
  EXPECT_THAT(batch_of(subset), ElementsAre(101, 102));
}

TEST(Subset, RefusesSamplesThatDoNotExist) {
  expect_error<UsageError>([] { Subset(TenNumbers(), {3, 10}); }, "index 1 is sample 10", "the dataset has 10 samples");
  Subset subset(TenNumbers(), {3, 4});
  expect_error<UsageError>([&] { subset.get(2); }, "sample 2 is out of range", "the subset has 2 samples");
}

// --- random_split

TEST(RandomSplit, DividesAllSamples) {
  const auto parts = random_split(TenNumbers{100}, {70, 30}, {.seed = 4});
  ASSERT_EQ(parts.size(), 2);
  EXPECT_EQ(parts[0].size(), 70);
  EXPECT_EQ(parts[1].size(), 30);
  Indices all = parts[0].indices();
  all.insert(all.end(), parts[1].indices().begin(), parts[1].indices().end());
  Indices in_order(100);
  std::iota(in_order.begin(), in_order.end(), 0);
  EXPECT_NE(all, in_order);
  EXPECT_THAT(all, testing::UnorderedElementsAreArray(in_order));
}

TEST(RandomSplit, DependsOnTheSeed) {
  const auto split = [](uint64_t seed) {
    return indices_of(random_split(TenNumbers{100}, {0.7, 0.3}, {.seed = seed}));
  };
  EXPECT_EQ(split(4), split(4));
  EXPECT_NE(split(4), split(5));
}

TEST(RandomSplit, RoundsFractionsDownAndDealsTheRestInTurn) {
  EXPECT_THAT(sizes_of(10, {0.5, 0.25, 0.25}), ElementsAre(6, 2, 2));
  EXPECT_THAT(sizes_of(11, {0.25, 0.25, 0.25, 0.25}), ElementsAre(3, 3, 3, 2));
  EXPECT_THAT(sizes_of(10, {0.7, 0.2, 0.1}), ElementsAre(7, 2, 1));  // the sum is a little less than 1
  EXPECT_THAT(sizes_of(3, {1.0}), ElementsAre(3));
  EXPECT_THAT(sizes_of(4, {0.0, 1.0}), ElementsAre(0, 4));
}

TEST(RandomSplit, TakesNumbersOfAnyIntegerType) {
  const size_t size = 10;
  EXPECT_THAT(sizes_of(size, {size - 3, 3, int64_t{0}}), ElementsAre(7, 3, 0));
  EXPECT_THAT(sizes_of(0, {0}), ElementsAre(0));
  EXPECT_THAT(sizes_of(1, {1}), ElementsAre(1));
}

TEST(RandomSplit, IsThatOfPython) {
  const char* python = std::getenv("LOCKSTEP_TEST_PYTHON");
  if (!python || !*python) GTEST_SKIP() << "needs Python's torch: set LOCKSTEP_TEST_PYTHON";
  struct Case {
    std::string question;
    std::vector<Subset<TenNumbers>> parts;
  };
  std::vector<Case> cases;
  for (const uint64_t seed : {0, 7}) {
    const auto words = std::to_string(seed) + " ";
    cases.push_back({words + "10 7 3", random_split(TenNumbers{10}, {7, 3}, {.seed = seed})});
    cases.push_back({words + "101 1 99 1", random_split(TenNumbers{101}, {1, 99, 1}, {.seed = seed})});
    cases.push_back({words + "103 0.9 0.1", random_split(TenNumbers{103}, {0.9, 0.1}, {.seed = seed})});
    cases.push_back(
        {words + "11 0.25 0.25 0.25 0.25", random_split(TenNumbers{11}, {0.25, 0.25, 0.25, 0.25}, {.seed = seed})});
    cases.push_back({words + "1000 0.7 0.2 0.1", random_split(TenNumbers{1000}, {0.7, 0.2, 0.1}, {.seed = seed})});
  }
  const TemporaryFolder folder;
  const auto in = (folder.path() / "in").string(), out = (folder.path() / "out").string();
  {
    std::ofstream file(in);
    for (const auto& one : cases) file << one.question << '\n';
  }
  ASSERT_EQ(run_python(python, "data/subset_oracle.py", {}, {.in = in, .out = out}), 0);
  std::ifstream answers(out);
  for (const auto& one : cases) {
    std::string line;
    ASSERT_TRUE(std::getline(answers, line)) << one.question;
    std::ostringstream expected;
    for (const auto& part : one.parts) {
      for (const size_t index : part.indices()) expected << index << ' ';
      expected << "| ";
    }
    EXPECT_EQ(line + " ", expected.str()) << one.question;
  }
}

struct Endless {
  torch::optional<size_t> size() const { return torch::nullopt; }
  int64_t get(size_t index) const { return static_cast<int64_t>(index); }
};

TEST(RandomSplit, RefusesSizesThatDoNotAddUp) {
  const auto expect_refusal = [](const std::vector<PartSize>& sizes, const auto&... parts) {
    expect_error<UsageError>([&] { random_split(TenNumbers{10}, sizes); }, "random_split: ", parts...);
  };
  expect_refusal({7, 2}, "the sizes 7 + 2 do not add up to 10");
  expect_refusal({7, 4}, "the sizes 7 + 4 do not add up to 10");
  expect_refusal({11, -1}, "size 1 is -1, expected 0 or more");
  expect_refusal({0.7, 0.2}, "the fractions add up to 0.9, expected 1");
  expect_refusal({0.33333333, 0.33333333, 0.33333333}, "the fractions add up to 0.99999999,");
  expect_refusal({1.5, -0.5}, "fraction 0 is 1.5, expected 0 to 1");
  expect_refusal({0.5, 5}, "size 1 is a number of samples and size 0 is a fraction");
  expect_refusal({}, "there are no sizes");
  expect_error<UsageError>([] { random_split(Endless(), {0.5, 0.5}); }, "the dataset does not know its size");
}

}  // namespace
}  // namespace lockstep
