#include <lockstep/stream_loader.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/error.h>

#include "data/streams.h"
#include "support/forked.h"
#include "support/messages.h"
#include "support/python.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

void alone(const std::function<void(ProcessGroup)>& body) {
  run_threads(1, body);
}

/// Reads what a function returns.
template <class Sample>
struct FromFunction {
  std::optional<Sample> next() { return read(); }
  std::function<std::optional<Sample>()> read;
};

// --- order

class StreamWorkers : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(, StreamWorkers, testing::Values(0, 1, 2, 5));

TEST_P(StreamWorkers, DeliverEverySampleOnce) {
  for (const int ranks : {1, 2, 3})
    for (const int parts : {0, 6, 12})
      for (const int64_t samples : {0, 1, 50}) {
        SCOPED_TRACE(testing::Message() << ranks << " ranks, " << parts << " parts, " << samples << " samples");
        std::vector<int64_t> seen(static_cast<size_t>(samples));
        for (const auto& of_rank :
             epoch_of(ranks, dealt(samples),
                      {.batch_size = 4, .num_workers = GetParam(), .parts = parts, .end = StreamEnd::kEach}))
          for (const auto& batch : of_rank)
            for (int64_t number : batch) ++seen.at(static_cast<size_t>(number));
        EXPECT_THAT(seen, Each(1));
      }
}

TEST_P(StreamWorkers, DoNotChangeTheOrder) {
  const auto open = of_lengths({5, 0, 2, 9, 4, 1, 7, 6});
  const auto expected = std::vector<Batches64>{
      {{0, 1}, {2000, 2001}, {4000, 4001}, {6000, 6001}, {2, 3}, {4002, 4003}, {6002, 6003}, {4}, {6004, 6005}, {6006}},
      {{3000, 3001},
       {5000},
       {7000, 7001},
       {3002, 3003},
       {7002, 7003},
       {3004, 3005},
       {7004, 7005},
       {3006, 3007},
       {3008}}};
  EXPECT_EQ(epoch_of(2, open, {.batch_size = 2, .num_workers = GetParam(), .parts = 8, .end = StreamEnd::kEach}),
            expected);
}

TEST_P(StreamWorkers, LeaveOutTheSmallerBatchOfEachPartWhenTold) {
  const StreamLoaderOptions options{.batch_size = 2, .drop_last = true, .num_workers = GetParam(), .parts = 3};
  EXPECT_THAT(epoch_of(1, of_lengths({3, 1, 4}), options)[0],
              ElementsAre(Numbers64{0, 1}, Numbers64{2000, 2001}, Numbers64{2002, 2003}));
}

TEST(StreamLoader, HasAPartForEachWorkerByDefault) {
  std::mutex mutex;
  std::set<std::pair<int, int>> parts;  // index and count
  const auto open = [&](const StreamPart& part) {
    const std::lock_guard lock(mutex);
    parts.emplace(part.index, part.count);
    return Counting{};
  };
  epoch_of(2, open, {.num_workers = 2});
  EXPECT_THAT(parts, ElementsAre(std::pair(0, 4), std::pair(1, 4), std::pair(2, 4), std::pair(3, 4)));
  parts.clear();
  epoch_of(3, open, {.num_workers = 0});
  EXPECT_THAT(parts, ElementsAre(std::pair(0, 3), std::pair(1, 3), std::pair(2, 3)));
}

class PythonStreams : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(With, PythonStreams, testing::Values("LOCKSTEP_TEST_PYTHON", "LOCKSTEP_TEST_PYTHON_2X"),
                         [](const auto& info) { return std::string(info.param).ends_with("2X") ? "2x" : "installed"; });

TEST_P(PythonStreams, HaveTheSameBatches) {
  const char* python = std::getenv(GetParam());
  if (!python || !*python) GTEST_SKIP() << "needs Python's torch: set " << GetParam();
  struct Case {
    int ranks, workers;
    int64_t batch_size;
    bool drop_last;
    Numbers64 samples;  // of each part
  };
  const std::vector<Case> cases{{1, 0, 3, false, {7}},           {1, 1, 3, true, {7}},
                                {1, 3, 3, false, {7, 0, 2}},     {1, 3, 3, true, {7, 0, 2}},
                                {1, 4, 2, false, {1, 20, 4, 5}}, {2, 2, 2, false, {5, 9, 4, 1}},
                                {2, 2, 2, true, {5, 9, 4, 1}},   {2, 3, 1, false, {3, 0, 1, 4, 6, 2}}};
  const TemporaryFolder folder;
  const auto in = (folder.path() / "in").string(), out = (folder.path() / "out").string();
  std::vector<Batches64> ours;
  {
    std::ofstream file(in);
    for (const auto& [ranks, workers, batch_size, drop_last, samples] : cases) {
      for (auto& batches : epoch_of(
               ranks, of_lengths(samples),
               {.batch_size = batch_size, .drop_last = drop_last, .num_workers = workers, .end = StreamEnd::kEach}))
        ours.push_back(std::move(batches));
      for (int rank = 0; rank < ranks; ++rank) {
        file << rank << ' ' << ranks << ' ' << workers << ' ' << batch_size << ' ' << drop_last;
        for (int64_t count : samples) file << ' ' << count;
        file << '\n';
      }
    }
  }
  ASSERT_EQ(run_python(python, "data/stream_oracle.py", {}, {.in = in, .out = out}), 0);
  std::ifstream answers(out);
  for (const auto& batches : ours) {
    std::string line, expected;
    ASSERT_TRUE(std::getline(answers, line));
    for (const auto& batch : batches) {
      if (!expected.empty()) expected += ' ';
      for (size_t i = 0; i < batch.size(); ++i) expected += (i > 0 ? "," : "") + std::to_string(batch[i]);
    }
    EXPECT_EQ(expected, line);
  }
}

TEST(StreamLoader, SeedsDifferBetweenPartsAndEpochs) {
  const auto open = [](const StreamPart& part) {
    return FromFunction<int64_t>{[left = 1, seed = part.seed]() mutable {
      return left-- > 0 ? std::optional(static_cast<int64_t>(seed)) : std::nullopt;
    }};
  };
  std::set<int64_t> seeds;
  const auto drawn = [&](uint64_t seed, int64_t epoch) {
    const auto all = epoch_of(2, open, {.num_workers = 2, .seed = seed}, epoch);
    for (const auto& batches : all)
      for (const auto& batch : batches) seeds.insert(batch.begin(), batch.end());
    return all;
  };
  const auto first = drawn(7, 0);
  EXPECT_EQ(drawn(7, 0), first);
  EXPECT_EQ(seeds.size(), 4u);
  drawn(7, 1);
  drawn(8, 0);
  EXPECT_EQ(seeds.size(), 12u);
}

// --- ends

TEST(StreamLoader, EndsOnAllRanksWhenTheFirstHasNoBatch) {
  const auto open = of_lengths({6, 5, 3, 3, 0, 1});  // 3 + 2 batches, 3 + 0 and 2 + 1
  for (const int workers : {0, 1, 2}) {
    const auto batches = epoch_of(3, open, {.batch_size = 2, .num_workers = workers, .parts = 6});
    EXPECT_THAT(batches[0], ElementsAre(Numbers64{0, 1}, Numbers64{3000, 3001}, Numbers64{2, 3}));
    EXPECT_THAT(batches[1], ElementsAre(Numbers64{1000, 1001}, Numbers64{1002, 1003}, Numbers64{1004}));
    EXPECT_THAT(batches[2], ElementsAre(Numbers64{2000, 2001}, Numbers64{5000}, Numbers64{2002}));
  }
}

TEST(StreamLoader, EndsOnEachRankWhenItHasNoBatch) {
  const auto batches = epoch_of(2, of_lengths({1, 4}), {.batch_size = 2, .end = StreamEnd::kEach});
  EXPECT_THAT(batches[0], ElementsAre(Numbers64{0}));
  EXPECT_THAT(batches[1], ElementsAre(Numbers64{1000, 1001}, Numbers64{1002, 1003}));
}

TEST_P(StreamWorkers, ReadEndlessStreamsUpToALimit) {
  constexpr auto kForever = std::numeric_limits<int64_t>::max();
  for (const auto end : {StreamEnd::kTogether, StreamEnd::kEach}) {
    const auto batches = epoch_of(
        2, dealt(kForever), {.batch_size = 2, .num_workers = GetParam(), .parts = 4, .end = end, .max_batches = 3});
    EXPECT_THAT(batches[0], ElementsAre(Numbers64{0, 4}, Numbers64{2, 6}, Numbers64{8, 12}));
    EXPECT_THAT(batches[1], ElementsAre(Numbers64{1, 5}, Numbers64{3, 7}, Numbers64{9, 13}));
  }
}

TEST(StreamLoader, BeginsTheEpochAgainWhenALoopWasLeft) {
  run_threads(2, [](ProcessGroup world) {
    StreamLoader loader(dealt(12), world, {.batch_size = 2});
    const auto first = received_from(loader, 2);
    EXPECT_EQ(loader.next_epoch(), 0);
    const auto all = received_from(loader);
    EXPECT_EQ(all.size(), 3u);
    EXPECT_EQ(Batches64(all.begin(), all.begin() + 2), first);
    EXPECT_EQ(loader.next_epoch(), 1);
    EXPECT_EQ(received_from(loader), all) << "and after a whole loop";
  });
}

TEST(StreamLoader, ClosesStreamsAtTheirEnd) {
  struct Open {
    explicit Open(std::atomic<int>& count) : count(count) { ++count; }
    Open(const Open&) = delete;
    ~Open() { --count; }
    std::optional<int64_t> next() { return left-- > 0 ? std::optional(left) : std::nullopt; }
    std::atomic<int>& count;
    int64_t left = 3;
  };
  std::atomic<int> open = 0;
  alone([&](const ProcessGroup& world) {
    StreamLoader loader([&](const StreamPart&) { return std::make_unique<Open>(open); }, world, {.num_workers = 2});
    EXPECT_EQ(received_from(loader).size(), 6u);
    EXPECT_EQ(open, 0);
    received_from(loader, 1);
    EXPECT_GT(open, 0) << "a loop that was left";

    std::atomic<int> limited_open = 0;
    StreamLoader limited([&](const StreamPart&) { return std::make_unique<Open>(limited_open); }, world,
                         {.num_workers = 0, .max_batches = 1});
    EXPECT_EQ(received_from(limited).size(), 1u);
    EXPECT_EQ(limited_open, 0);
  });
  EXPECT_EQ(open, 0);
}

// --- failures

/// Part 1 fails at its sample 5.
auto torn() {
  return [](const StreamPart& part) {
    return FromFunction<int64_t>{[part, sample = 0]() mutable -> std::optional<int64_t> {
      if (part.index == 1 && sample == 5) throw std::out_of_range("a page is torn");
      return sample++;
    }};
  };
}

TEST_P(StreamWorkers, ThrowWhatAStreamThrowsWhenItsBatchIsDue) {
  alone([&](const ProcessGroup& world) {
    StreamLoader loader(torn(), world, {.batch_size = 2, .num_workers = GetParam(), .parts = 2});
    loader.set_epoch(4);
    auto batch = loader.begin();
    size_t delivered = 0;
    try {
      for (; batch != loader.end(); ++batch) ++delivered;
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), "rank 0: StreamLoader: epoch 4: part 1: sample 5: a page is torn");
      EXPECT_TRUE(holds<std::out_of_range>(error));
    }
    EXPECT_EQ(delivered, 5u);
    ++batch;
    EXPECT_TRUE(batch == loader.end()) << "the loop is over";
    EXPECT_EQ(loader.next_epoch(), 4);
  });
}

TEST(StreamLoader, ThrowsOnAllRanksWhatOneStreamThrows) {
  std::atomic<int> nested = 0;
  run_threads(3, [&](ProcessGroup world) {
    StreamLoader loader(torn(), world, {.batch_size = 2, .num_workers = 1});
    size_t delivered = 0;
    try {
      for ([[maybe_unused]] auto& batch : loader) ++delivered;
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), "rank 1: StreamLoader: epoch 0: part 1: sample 5: a page is torn");
      EXPECT_EQ(error.kind(), ErrorKind::kError);
      EXPECT_EQ(error.rank(), 1);
      nested += holds<std::out_of_range>(error) ? 1 : 0;
    }
    EXPECT_EQ(delivered, 2u);
    EXPECT_EQ(world.all_reduce(1), 3) << "the group still works";
    loader.set_epoch(1);
    EXPECT_EQ(received_from(loader, 2).size(), 2u) << "and the loader";
  });
  EXPECT_EQ(nested, 1) << "where it was thrown";
}

TEST(StreamLoader, KeepsTheKindOfAnErrorOnAllRanks) {
  run_threads(3, [](ProcessGroup world) {
    const auto open = [](const StreamPart& part) {
      if (part.index > 0) throw SystemError(std::string("no such file of part ") + std::to_string(part.index));
      return Counting{0, 1, 100};
    };
    StreamLoader loader(open, world, {.parts = 3});
    EXPECT_EQ(error_of<SystemError>([&] { loader.begin(); }),
              "rank 1: StreamLoader: epoch 0: part 1: open(): no such file of part 1")
        << "that of the first rank of two";
  });
}

TEST(StreamLoader, NamesTheSamplesThatMakeNoBatch) {
  alone([](const ProcessGroup& world) {
    const auto open = [](const StreamPart&) {
      return FromFunction<at::Tensor>{[sample = 0]() mutable { return torch::zeros(sample++ == 4 ? 3 : 2); }};
    };
    StreamLoader loader(open, world, {.batch_size = 3});
    EXPECT_THAT(error_of<UsageError>([&] {
                  for (auto& batch : loader) EXPECT_EQ(batch.size(1), 2);
                }),
                HasSubstr("rank 0: StreamLoader: epoch 0: part 0: samples 3 4 5: the samples cannot be stacked"));
  });
}

TEST(StreamLoader, NamesRanksThatAreInDifferentEpochs) {
  run_threads(3, [](ProcessGroup world) {
    StreamLoader loader(dealt(100), world);
    loader.set_epoch(world.rank() == 2 ? 5 : 4);
    EXPECT_THAT(error_of<MismatchError>([&] { loader.begin(); }),
                AllOf(HasSubstr("rank 0 has epoch 4, batch 0, parts 3"), HasSubstr("rank 2 has epoch 5, batch 0")));
    EXPECT_THAT(error_of<MismatchError>([&] { loader.state_dict(); }),
                HasSubstr("rank 0 is in epoch 4, rank 2 in epoch 5"));
    StreamLoader other(dealt(100), world, {.batch_size = world.rank() == 1 ? 3 : 2});
    EXPECT_THAT(error_of<MismatchError>([&] { other.begin(); }),
                AllOf(HasSubstr("rank 0 has epoch 0, batch 0, parts 3, batch_size 2"), HasSubstr("batch_size 3")));
  });
}

TEST(StreamLoader, RefusesWhatMakesNoSense) {
  run_threads(2, [](ProcessGroup world) {
    if (world.rank() == 0) return;
    const auto refused = [&](const StreamLoaderOptions& options) {
      return error_of<UsageError>([&] { StreamLoader loader(dealt(10), world, options); });
    };
    EXPECT_EQ(refused({.batch_size = 0}), "rank 1: StreamLoader: batch_size is 0, expected 1 or more");
    EXPECT_THAT(refused({.num_workers = -1}), HasSubstr("num_workers is -1, expected 0 or more"));
    EXPECT_THAT(refused({.prefetch_factor = 0}), HasSubstr("prefetch_factor is 0, expected 1 or more"));
    EXPECT_THAT(refused({.parts = 3}), HasSubstr("parts is 3, expected a multiple of the 2 ranks, or 0"));
    EXPECT_THAT(refused({.parts = -2}), HasSubstr("parts is -2, expected a multiple"));
    EXPECT_THAT(refused({.max_batches = -1}), HasSubstr("max_batches is -1, expected 0 or more"));
    StreamLoader loader(dealt(10), world);
    EXPECT_THAT(error_of<UsageError>([&] { loader.set_epoch(-1); }), HasSubstr("set_epoch(-1), expected 0 or more"));
    const auto words = [](const StreamPart&) { return FromFunction<std::string>{[] { return "word"; }}; };
    EXPECT_THAT(error_of<UsageError>([&] { StreamLoader of_words(words, world, {.device = torch::Device("cpu")}); }),
                HasSubstr("StreamLoader: device or pin_memory is set"));
  });
}

TEST(StreamLoader, IsForRanksOfItsGroup) {
  run_threads(2, [](ProcessGroup world) {
    const auto first = world.new_group({0});
    const auto made = error_of<UsageError>([&] { StreamLoader loader(dealt(10), first); });
    if (world.rank() == 0) {
      EXPECT_EQ(made, "no such error");
    } else {
      EXPECT_THAT(made, HasSubstr("this process is not in the group 'world/1'"));
    }
  });
}

TEST(StreamLoader, RefusesTwoLoopsAtATime) {
  alone([](const ProcessGroup& world) {
    StreamLoader loader(dealt(8), world, {.batch_size = 2});
    auto first = loader.begin();
    auto second = loader.begin();
    EXPECT_THAT(error_of<UsageError>([&] { ++first; }), HasSubstr("another loop over this loader has started"));
    EXPECT_EQ(numbers_received(*second), (Numbers64{0, 1}));
    loader.load_state_dict(loader.state_dict());
    EXPECT_THAT(error_of<UsageError>([&] { ++second; }), HasSubstr("or a state was loaded"));
    EXPECT_THAT(received_from(loader), ElementsAre(Numbers64{2, 3}, Numbers64{4, 5}, Numbers64{6, 7}));
  });
}

// --- workers and batches

TEST(StreamLoader, ReadsAheadAndNoFurtherThanItMay) {
  alone([](const ProcessGroup& world) {
    std::mutex mutex;
    std::condition_variable changed;
    size_t reads = 0;
    const auto open = [&](const StreamPart&) {
      return FromFunction<int64_t>{[&]() -> std::optional<int64_t> {
        const std::lock_guard lock(mutex);
        ++reads;
        changed.notify_all();
        return 0;
      }};
    };
    StreamLoader loader(open, world, {.batch_size = 2, .num_workers = 2, .prefetch_factor = 3, .max_batches = 20});
    size_t delivered = 0;
    for ([[maybe_unused]] auto& batch : loader) {
      const size_t furthest = 2 * (++delivered + 6);
      std::unique_lock lock(mutex);
      EXPECT_TRUE(changed.wait_for(lock, 30s, [&] { return reads >= furthest; })) << reads << " of " << furthest;
      EXPECT_EQ(reads, furthest);
    }
    EXPECT_EQ(delivered, 20u);
  });
}

TEST(StreamLoader, ReadsEachPartOnOneThreadAndPartsOnSeveral) {
  alone([](const ProcessGroup& world) {
    std::mutex mutex;
    std::map<int, std::set<std::thread::id>> threads;  // of each part
    const auto open = [&](const StreamPart& part) {
      return FromFunction<int64_t>{[&, part, left = 5]() mutable -> std::optional<int64_t> {
        const std::lock_guard lock(mutex);
        threads[part.index].insert(std::this_thread::get_id());
        return left-- > 0 ? std::optional(int64_t{0}) : std::nullopt;
      }};
    };
    StreamLoader loader(open, world, {.num_workers = 2, .parts = 6});
    EXPECT_EQ(received_from(loader).size(), 30u);
    for (int part = 0; part < 6; ++part) {
      EXPECT_EQ(threads[part].size(), 1u);
      EXPECT_EQ(threads[part], threads[part % 2]);
    }
    EXPECT_NE(threads[0], threads[1]);
    EXPECT_FALSE(threads[0].contains(std::this_thread::get_id()));
  });
}

TEST(StreamLoader, ComputesOnTheWorkersThreadWithoutAutograd) {
  const int before = torch::get_num_threads();
  torch::set_num_threads(3);
  alone([](const ProcessGroup& world) {
    const auto weight = torch::ones({1}, torch::requires_grad());
    std::atomic<int> threads = 0;
    const auto open = [&](const StreamPart&) {
      return FromFunction<at::Tensor>{[&, left = 1]() mutable -> std::optional<at::Tensor> {
        threads = at::get_num_threads();
        return left-- > 0 ? std::optional(weight * 2) : std::nullopt;
      }};
    };
    StreamLoader loader(open, world);
    for (auto& batch : loader) EXPECT_FALSE(batch.requires_grad());
    EXPECT_EQ(threads, 1);
  });
  torch::set_num_threads(before);
}

TEST(StreamLoader, MakesBatchesAsADataLoader) {
  alone([](const ProcessGroup& world) {
    using torch::data::Example;
    const auto examples = [](const StreamPart&) {
      return FromFunction<Example<>>{[left = 3]() mutable -> std::optional<Example<>> {
        if (left-- == 0) return std::nullopt;
        return Example<>(torch::ones({left + 1, 2}), torch::tensor(left));
      }};
    };
    StreamLoader padded(examples, world, Pad(), {.batch_size = 3, .device = torch::Device("meta")});
    for (PaddedBatch& batch : padded) {
      EXPECT_TRUE(batch.data.is_meta());
      EXPECT_EQ(batch.data.sizes(), (std::vector<int64_t>{3, 3, 2}));
    }
    const auto sizes = [](std::vector<Example<>> samples) { return samples.size(); };
    StreamLoader counted(examples, world, sizes, {.batch_size = 2});
    std::vector<size_t> counts;
    for (size_t& batch : counted) counts.push_back(batch);
    EXPECT_THAT(counts, ElementsAre(2, 1));
    const auto shared = [](const StreamPart&) { return std::make_shared<Counting>(Counting{0, 1, 2}); };
    StreamLoader pointed(shared, world, {.batch_size = 2});
    EXPECT_THAT(received_from(pointed), ElementsAre(Numbers64{0, 1}));
  });
}

TEST(StreamLoader, TellsHowLongTheLoopHasWaited) {
  alone([](const ProcessGroup& world) {
    bool is_slow = true;
    const auto open = [&](const StreamPart&) {
      return FromFunction<int64_t>{[&, left = 4]() mutable -> std::optional<int64_t> {
        if (is_slow) std::this_thread::sleep_for(50ms);
        return left-- > 0 ? std::optional(int64_t{0}) : std::nullopt;
      }};
    };
    StreamLoader loader(open, world, {.num_workers = 0});
    received_from(loader);
    const auto slow = loader.waited();
    EXPECT_GE(slow, 250ms);
    is_slow = false;
    received_from(loader);
    EXPECT_GT(loader.waited(), 0ms);
    EXPECT_LT(loader.waited(), slow) << "of the last loop alone";
  });
}

TEST(StreamLoader, HasNoWorkersInAForkedChild) {
  alone([](const ProcessGroup& world) {
    using Loader = StreamLoader<decltype(dealt(100))>;
    std::optional<Loader> with_workers(std::in_place, dealt(100), world,
                                       StreamLoaderOptions{.batch_size = 10, .num_workers = 2});
    std::optional<Loader> without(std::in_place, dealt(100), world,
                                  StreamLoaderOptions{.batch_size = 10, .num_workers = 0});
    auto loop = with_workers->begin();
    const int code = exit_code_of_fork([&] {
      expect_error<UsageError>([&] { ++loop; }, "was forked from the process that made the StreamLoader");
      expect_error<UsageError>([&] { with_workers->begin(); },
                               "was forked from the process that made the StreamLoader");
      EXPECT_EQ(received_from(*without).size(), 10u);
      with_workers.reset();
      without.reset();
      ::_exit(testing::Test::HasFailure() ? 1 : 0);  // exit() destroys LibTorch's thread pool, which crashes in a child
    });
    EXPECT_EQ(code, 0);
    EXPECT_EQ(received_from(*with_workers).size(), 10u);
  });
}

}  // namespace
}  // namespace lockstep
