#include <lockstep/distributed_sampler.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <numeric>
#include <sstream>
#include <string>
#include <thread>

#include <gtest/gtest.h>
#include <torch/data/dataloader.h>
#include <torch/data/datasets/base.h>
#include <torch/serialize/archive.h>
#include <unistd.h>

#include <lockstep/error.h>
#include <lockstep/logging.h>
#include <lockstep/run_threads.h>

#include "data/through_archive.h"
#include "support/messages.h"
#include "support/python.h"
#include "support/temporary_folder.h"

namespace {

using lockstep::distributed_indices;
using lockstep::DistributedSampler;
using lockstep::DistributedSamplerOptions;
using lockstep::Tail;
using lockstep::through_archive;
using Indices = std::vector<size_t>;

constexpr DistributedSamplerOptions kInOrder = {.shuffle = false};

Indices drain(DistributedSampler& sampler, size_t batch_size) {
  Indices all;
  while (auto batch = sampler.next(batch_size)) all.insert(all.end(), batch->begin(), batch->end());
  return all;
}

TEST(DistributedIndices, PadRepeatsTheStartSoThatEveryRankGetsAsMany) {
  EXPECT_EQ(distributed_indices(5, 0, 3, kInOrder, 0), (Indices{0, 3}));
  EXPECT_EQ(distributed_indices(5, 1, 3, kInOrder, 0), (Indices{1, 4}));
  EXPECT_EQ(distributed_indices(5, 2, 3, kInOrder, 0), (Indices{2, 0}));
}

TEST(DistributedIndices, PadRepeatsMoreThanOnceWhenThereAreFewSamples) {
  EXPECT_EQ(distributed_indices(2, 4, 7, kInOrder, 0), (Indices{0}));
  EXPECT_EQ(distributed_indices(2, 5, 7, kInOrder, 0), (Indices{1}));
}

TEST(DistributedIndices, DropLeavesTheTailOut) {
  const DistributedSamplerOptions drop = {.shuffle = false, .tail = Tail::kDrop};
  EXPECT_EQ(distributed_indices(5, 0, 3, drop, 0), (Indices{0}));
  EXPECT_EQ(distributed_indices(5, 2, 3, drop, 0), (Indices{2}));
}

TEST(DistributedIndices, ExactDealsEverySampleOnce) {
  for (const size_t n : {1, 2, 3, 7, 10, 100, 1009}) {
    for (const int replicas : {1, 2, 3, 4, 8}) {
      Indices all;
      for (int rank = 0; rank < replicas; ++rank) {
        const Indices mine = distributed_indices(n, rank, replicas, {.seed = 3, .tail = Tail::kExact}, 1);
        EXPECT_LE(mine.size() - n / static_cast<size_t>(replicas), 1U);
        all.insert(all.end(), mine.begin(), mine.end());
      }
      std::sort(all.begin(), all.end());
      ASSERT_EQ(all, distributed_indices(n, 0, 1, kInOrder, 0)) << n << " samples, " << replicas << " replicas";
    }
  }
}

TEST(DistributedIndices, EpochAndSeedShiftTheSameShuffle) {
  EXPECT_EQ(distributed_indices(100, 1, 2, {.seed = 3}, 5), distributed_indices(100, 1, 2, {.seed = 8}, 0));
  EXPECT_NE(distributed_indices(100, 1, 2, {.seed = 3}, 4), distributed_indices(100, 1, 2, {.seed = 3}, 5));
}

struct OracleCase {
  size_t n;
  int replicas;
  int rank;
  DistributedSamplerOptions options;
  int64_t epoch;
};

std::ostream& operator<<(std::ostream& out, const OracleCase& c) {
  return out << c.n << ' ' << c.replicas << ' ' << c.rank << ' ' << c.options.shuffle << ' ' << c.options.seed << ' '
             << c.epoch << ' ' << (c.options.tail == Tail::kDrop);
}

std::vector<OracleCase> oracle_cases() {
  struct Shuffle {
    bool on;
    uint64_t seed;
    int64_t epoch;
  };
  const std::vector<Shuffle> shuffles = {{false, 0, 3},  {true, 0, 0},           {true, 0, 1},
                                         {true, 42, 18}, {true, 1ULL << 40, 99}, {true, ~0ULL, 0}};
  std::vector<OracleCase> cases;
  for (const size_t n : {1, 2, 3, 7, 10, 100, 1009}) {
    for (const int replicas : {1, 2, 3, 4, 5, 7, 8}) {
      for (int rank = 0; rank < replicas; ++rank) {
        for (const Shuffle& s : shuffles) {
          cases.push_back({n, replicas, rank, {s.on, s.seed, Tail::kPad}, s.epoch});
          cases.push_back({n, replicas, rank, {s.on, s.seed, Tail::kDrop}, s.epoch});
        }
      }
    }
  }
  cases.push_back({60000, 4, 1, {true, 5, Tail::kPad}, 2});
  cases.push_back({60000, 7, 6, {true, 5, Tail::kPad}, 2});
  cases.push_back({60000, 7, 6, {true, 5, Tail::kDrop}, 2});
  cases.push_back({60000, 7, 6, {false, 0, Tail::kPad}, 0});
  return cases;
}

TEST(DistributedIndices, AreThoseOfPython) {
  const char* python = std::getenv("LOCKSTEP_TEST_PYTHON");
  if (python == nullptr || *python == '\0') {
    GTEST_SKIP() << "needs Python's torch: apt-get install python3-torch, and set LOCKSTEP_TEST_PYTHON to python3";
  }
  const TemporaryFolder temporary;
  const auto& folder = temporary.path();
  const std::vector<OracleCase> cases = oracle_cases();
  {
    std::ofstream in(folder / "in");
    for (const OracleCase& c : cases) in << c << '\n';
  }
  ASSERT_EQ(run_python(python, "data/sampler_oracle.py", {},
                       {.in = (folder / "in").string(), .out = (folder / "out").string()}),
            0);

  std::ifstream out(folder / "out");
  for (const OracleCase& c : cases) {
    std::string line;
    ASSERT_TRUE(std::getline(out, line)) << "no answer to " << c;
    std::istringstream numbers(line);
    const Indices expected{std::istream_iterator<size_t>(numbers), std::istream_iterator<size_t>()};
    ASSERT_EQ(distributed_indices(c.n, c.rank, c.replicas, c.options, c.epoch), expected) << c;
  }
  RecordProperty("cases", static_cast<int>(cases.size()));
}

TEST(DistributedSampler, RefusesARankOutsideTheReplicas) {
  EXPECT_NE(error_of<lockstep::UsageError>([] { DistributedSampler(10, 3, 3); }).find("rank is 3, expected 0 to 2"),
            std::string::npos);
  EXPECT_NE(error_of<lockstep::UsageError>([] { DistributedSampler(10, -1, 3); }).find("rank is -1"),
            std::string::npos);
  EXPECT_NE(error_of<lockstep::UsageError>([] { DistributedSampler(10, 0, 0); }).find("num_replicas is 0"),
            std::string::npos);
}

TEST(DistributedSampler, RefusesADatasetThatLeavesNothing) {
  EXPECT_NE(error_of<lockstep::UsageError>([] { DistributedSampler(0, 0, 1); }).find("0 samples"), std::string::npos);
  EXPECT_NE(error_of<lockstep::UsageError>([] {
              DistributedSampler(2, 0, 3, {.tail = Tail::kDrop});
            }).find("2 samples among 3 replicas"),
            std::string::npos);
  DistributedSampler shrinking(4, 0, 3, {.tail = Tail::kDrop});
  EXPECT_THROW(shrinking.reset(2), lockstep::UsageError);
  EXPECT_EQ(shrinking.size(), 1U);
}

TEST(DistributedSampler, RefusesSenselessBatchesAndEpochs) {
  DistributedSampler sampler(10, 0, 1);
  EXPECT_THROW(sampler.next(0), lockstep::UsageError);
  EXPECT_THROW(sampler.set_epoch(-1), lockstep::UsageError);
}

TEST(DistributedSampler, GivesAShortLastBatchAndThenNothing) {
  DistributedSampler sampler(10, 1, 2, kInOrder);
  EXPECT_EQ(sampler.next(3), (Indices{1, 3, 5}));
  EXPECT_EQ(sampler.next(3), (Indices{7, 9}));
  EXPECT_FALSE(sampler.next(3).has_value());
  sampler.reset();
  EXPECT_EQ(drain(sampler, 2), (Indices{1, 3, 5, 7, 9}));
}

TEST(DistributedSampler, MayGiveARankNothingWhenExact) {
  DistributedSampler sampler(2, 2, 3, {.tail = Tail::kExact});
  EXPECT_EQ(sampler.size(), 0U);
  EXPECT_FALSE(sampler.next(1).has_value());
}

TEST(DistributedSampler, TakesANewSizeAtReset) {
  DistributedSampler sampler(10, 0, 2, kInOrder);
  sampler.reset(4);
  EXPECT_EQ(sampler.size(), 2U);
  EXPECT_EQ(drain(sampler, 1), (Indices{0, 2}));
}

TEST(DistributedSampler, KeepsTheEpochItIsDealingUntilReset) {
  DistributedSampler sampler(100, 0, 2, {.seed = 1});
  sampler.set_epoch(5);
  EXPECT_EQ(sampler.indices(), distributed_indices(100, 0, 2, {.seed = 1}, 5));
  EXPECT_EQ(drain(sampler, 8), distributed_indices(100, 0, 2, {.seed = 1}, 0));
  sampler.reset();
  EXPECT_EQ(drain(sampler, 8), sampler.indices());
}

class IndexDataset : public torch::data::datasets::Dataset<IndexDataset, size_t> {
 public:
  explicit IndexDataset(torch::optional<size_t> count) : count_(count) {}
  size_t get(size_t index) override { return index; }
  torch::optional<size_t> size() const override { return count_; }

 private:
  torch::optional<size_t> count_;
};

TEST(DistributedSampler, SetEpochOnTheOriginalReachesTheLoader) {
  DistributedSampler sampler(50, 1, 3, {.seed = 9});
  for (const size_t workers : {0, 2}) {
    auto loader = torch::data::make_data_loader(IndexDataset(50), sampler,
                                                torch::data::DataLoaderOptions().batch_size(4).workers(workers));
    for (int epoch = 0; epoch < 3; ++epoch) {
      sampler.set_epoch(epoch);
      Indices seen;
      for (const auto& batch : *loader) seen.insert(seen.end(), batch.begin(), batch.end());
      EXPECT_EQ(seen, distributed_indices(50, 1, 3, {.seed = 9}, epoch)) << workers << " workers, epoch " << epoch;
    }
  }
}

TEST(DistributedSampler, TakesRankSizeAndDatasetFromWhatItIsGiven) {
  lockstep::run_threads(3, [](const lockstep::ProcessGroup& world) {
    const Indices expected = distributed_indices(10, world.rank(), 3, {.seed = 2}, 0);
    const std::vector<double> samples(10);
    EXPECT_EQ(DistributedSampler(10, world, {.seed = 2}).indices(), expected);
    EXPECT_EQ(DistributedSampler(samples, world, {.seed = 2}).indices(), expected);
    EXPECT_EQ(DistributedSampler(IndexDataset(10), world, {.seed = 2}).indices(), expected);
    EXPECT_NE(error_of<lockstep::UsageError>([&] {
                DistributedSampler(IndexDataset(torch::nullopt), world);
              }).find("does not know its size"),
              std::string::npos);
  });
}

// What the log says while it lives.
class CapturedLog {
 public:
  CapturedLog() {
    lockstep::set_log_level(lockstep::LogLevel::kWarning);
    lockstep::set_log_sink([this](lockstep::LogLevel, const std::string& line) { lines.push_back(line); });
  }
  ~CapturedLog() { lockstep::set_log_sink(nullptr); }
  CapturedLog(const CapturedLog&) = delete;
  CapturedLog& operator=(const CapturedLog&) = delete;

  std::vector<std::string> lines;
};

TEST(DistributedSampler, WarnsOnceWhenEveryEpochHasTheSameOrder) {
  const CapturedLog log;
  DistributedSampler sampler(10, 0, 2);
  sampler.reset();
  EXPECT_EQ(log.lines.size(), 0U);
  for (int i = 0; i < 3; ++i) sampler.reset();
  ASSERT_EQ(log.lines.size(), 1U);
  EXPECT_NE(log.lines[0].find("call sampler.set_epoch(epoch) before each epoch"), std::string::npos) << log.lines[0];
}

TEST(DistributedSampler, DoesNotWarnThoseWhoSetTheEpochOrDoNotShuffle) {
  const CapturedLog log;
  DistributedSampler shuffled(10, 0, 2);
  DistributedSampler in_order(10, 0, 2, kInOrder);
  DistributedSampler not_the_first_rank(10, 1, 2);
  shuffled.set_epoch(0);
  for (int i = 0; i < 3; ++i) {
    shuffled.reset();
    in_order.reset();
    not_the_first_rank.reset();
  }
  EXPECT_EQ(log.lines, std::vector<std::string>());
}

TEST(DistributedSampler, ContinuesWhereItWasSaved) {
  for (const bool reset_after_load : {false, true}) {
    DistributedSampler saved(100, 1, 3, {.seed = 4});
    saved.set_epoch(6);
    saved.reset();
    const auto before = saved.next(10);
    DistributedSampler resumed(100, 1, 3, {.seed = 4});
    through_archive(saved, resumed);
    EXPECT_EQ(resumed.epoch(), 6);
    if (reset_after_load) resumed.reset();
    EXPECT_EQ(drain(resumed, 7), drain(saved, 7));
    resumed.reset();
    EXPECT_EQ(drain(resumed, 7), saved.indices());
  }
}

TEST(DistributedSampler, StartsAfreshAfterAFinishedOrAnotherEpoch) {
  DistributedSampler saved(10, 0, 2, kInOrder);
  saved.next(2);
  DistributedSampler other_epoch(10, 0, 2, kInOrder);
  through_archive(saved, other_epoch);
  other_epoch.set_epoch(1);
  other_epoch.reset();
  EXPECT_EQ(drain(other_epoch, 5).size(), 5U);

  drain(saved, 2);
  DistributedSampler fewer_replicas(10, 0, 1, kInOrder);
  through_archive(saved, fewer_replicas);
  EXPECT_FALSE(fewer_replicas.next(1).has_value());
  through_archive(saved, fewer_replicas);
  fewer_replicas.reset();
  EXPECT_EQ(drain(fewer_replicas, 3).size(), 10U);
}

TEST(DistributedSampler, AllRanksMayLoadWhatOneSaved) {
  const DistributedSamplerOptions exact = {.shuffle = false, .tail = Tail::kExact};
  DistributedSampler saved(7, 0, 3, exact);
  saved.next(2);
  DistributedSampler shorter(7, 2, 3, exact);
  through_archive(saved, shorter);
  shorter.reset();
  EXPECT_FALSE(shorter.next(1).has_value());
}

TEST(DistributedSampler, RefusesToContinueSomethingElse) {
  DistributedSampler saved(100, 0, 2, {.seed = 4});
  saved.next(10);
  const auto refusal = [&](DistributedSampler other) {
    return error_of<lockstep::UsageError>([&] { through_archive(saved, other); });
  };
  EXPECT_NE(refusal({90, 0, 2, {.seed = 4}}).find("dataset of 100 samples, this one has 90"), std::string::npos);
  EXPECT_NE(refusal({100, 0, 2, {.seed = 5}}).find("seed 4, this sampler has 5"), std::string::npos);
  EXPECT_NE(refusal({100, 0, 2, {.shuffle = false}}).find("shuffle 1"), std::string::npos);
  EXPECT_NE(refusal({100, 0, 2, {.seed = 4, .tail = Tail::kDrop}}).find("tail 0"), std::string::npos);
}

/// The samples that `replicas` ranks see together from where `saved` was, and how many of them each sees.
Indices rest_of_epoch(const DistributedSampler& saved, int replicas, std::vector<size_t>* sizes = nullptr) {
  Indices all;
  for (int rank = 0; rank < replicas; ++rank) {
    DistributedSampler sampler(saved.dataset_size(), rank, replicas, saved.options());
    through_archive(saved, sampler);
    sampler.reset();
    const auto mine = drain(sampler, 3);
    EXPECT_EQ(mine.size(), sampler.size() - (replicas == saved.num_replicas() ? saved.position() : 0));
    if (sizes) sizes->push_back(mine.size());
    all.insert(all.end(), mine.begin(), mine.end());
  }
  return all;
}

TEST(DistributedSampler, AnotherNumberOfReplicasSeesTheRestOfTheEpochOnce) {
  for (const auto tail : {Tail::kPad, Tail::kDrop, Tail::kExact})
    for (const size_t size : {7, 100, 101, 119})
      for (const int before : {1, 2, 4})
        for (const int after : {1, 2, 3, 4, 7})
          for (const size_t taken : {1, 2, 5}) {
            SCOPED_TRACE(testing::Message() << size << " samples, tail " << static_cast<int>(tail) << ", " << before
                                            << " to " << after << " replicas after " << taken);
            const DistributedSamplerOptions options{.seed = 9, .tail = tail};
            Indices seen;
            std::vector<DistributedSampler> first;
            bool is_over = false;
            for (int rank = 0; rank < before; ++rank) {
              first.emplace_back(size, rank, before, options);
              const auto batch = first.back().next(taken);
              if (batch) seen.insert(seen.end(), batch->begin(), batch->end());
              is_over |= first.back().position() == first.back().size();
            }
            if (is_over) continue;  // another test: the next epoch begins
            std::vector<size_t> sizes;
            const auto rest = rest_of_epoch(first[0], after, &sizes);
            seen.insert(seen.end(), rest.begin(), rest.end());
            std::vector<int> times(size, 0);
            for (size_t index : seen) ++times[index];
            const auto left = static_cast<int64_t>(size) - static_cast<int64_t>(taken) * before;
            const auto [fewest, most] = std::minmax_element(sizes.begin(), sizes.end());
            if (tail == Tail::kExact) {
              EXPECT_EQ(std::count(times.begin(), times.end(), 1), static_cast<int64_t>(size));
              EXPECT_LE(*most - *fewest, 1u);
            } else {
              EXPECT_EQ(*most, *fewest);
            }
            if (tail == Tail::kPad) {
              EXPECT_EQ(std::count(times.begin(), times.end(), 0), 0);
              EXPECT_LT(static_cast<int64_t>(rest.size()) - left, after);
            }
            if (tail == Tail::kDrop) {
              EXPECT_EQ(std::count(times.begin(), times.end(), 0), left % after);
              EXPECT_EQ(*std::max_element(times.begin(), times.end()), 1);
            }
          }
}

TEST(DistributedSampler, MayChangeTheNumberOfReplicasTwiceInAnEpoch) {
  const DistributedSamplerOptions options{.seed = 2, .tail = Tail::kExact};
  Indices seen;
  const auto take = [&](DistributedSampler& sampler, size_t count) {
    const auto batch = sampler.next(count).value();
    seen.insert(seen.end(), batch.begin(), batch.end());
  };
  std::vector<DistributedSampler> four, two;
  for (int rank = 0; rank < 4; ++rank) take(four.emplace_back(100, rank, 4, options), 3);
  for (int rank = 0; rank < 2; ++rank) {
    two.emplace_back(100, rank, 2, options);
    through_archive(four[1], two.back());
    two.back().reset();
    take(two.back(), 5);
  }
  const auto rest = rest_of_epoch(two[0], 3);
  seen.insert(seen.end(), rest.begin(), rest.end());
  std::sort(seen.begin(), seen.end());
  Indices all(100);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(seen, all);

  // The next epoch is whole again.
  two[0].set_epoch(1);
  two[0].reset();
  EXPECT_EQ(drain(two[0], 7), distributed_indices(100, 0, 2, options, 1));
}

struct WrittenByHand {
  int64_t position;
  void save(torch::serialize::OutputArchive& archive) const {
    for (const char* key : {"epoch", "finished", "shuffle", "seed", "tail"}) archive.write(key, c10::IValue(0));
    archive.write("dataset_size", c10::IValue(10));
    archive.write("num_replicas", c10::IValue(2));
    if (position != 0) archive.write("position", c10::IValue(position));
  }
};

TEST(DistributedSampler, RefusesDamagedArchives) {
  DistributedSampler sampler(10, 0, 2, kInOrder);
  const auto refusal = [&](int64_t position) {
    return error_of<lockstep::UsageError>([&] { through_archive(WrittenByHand{position}, sampler); });
  };
  EXPECT_NE(refusal(0).find("no integer 'position'"), std::string::npos);
  EXPECT_NE(refusal(5).find("position 5, expected"), std::string::npos);
  EXPECT_NE(refusal(-1).find("position -1, expected"), std::string::npos);
  EXPECT_EQ(refusal(3), "no such error");
  EXPECT_EQ(sampler.next(9), (Indices{6, 8}));
}

TEST(DistributedSampler, CopiesMayBeUsedFromManyThreads) {
  DistributedSampler sampler(1000, 0, 1, kInOrder);
  std::vector<Indices> seen(4);
  std::vector<std::thread> threads;
  for (Indices& mine : seen) {
    threads.emplace_back([copy = sampler, &mine]() mutable { mine = drain(copy, 3); });
  }
  for (std::thread& thread : threads) thread.join();
  Indices all;
  for (const Indices& mine : seen) all.insert(all.end(), mine.begin(), mine.end());
  std::sort(all.begin(), all.end());
  EXPECT_EQ(all, sampler.indices());
}

}  // namespace
