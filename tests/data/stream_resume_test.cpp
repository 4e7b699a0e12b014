#include <algorithm>
#include <atomic>
#include <mutex>
#include <random>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint_directory.h>
#include <lockstep/error.h>
#include <lockstep/run_threads.h>
#include <lockstep/stream_loader.h>
#include <lockstep/training_state.h>

#include "data/streams.h"
#include "support/messages.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

/// Part p has a few samples, which are random numbers from its seed.
struct Random {
  explicit Random(const StreamPart& part) : draw(part.seed), left(3 + 2 * part.index) {}
  std::optional<int64_t> next() { return left-- > 0 ? std::optional(static_cast<int64_t>(draw() >> 1)) : std::nullopt; }

  std::mt19937_64 draw;
  int left;
};

/// The same, and jumps. Counts the calls of all.
struct Jumping : Random {
  struct Calls {
    std::atomic<int> reads = 0, skips = 0;
  };
  Jumping(const StreamPart& part, Calls& calls) : Random(part), calls(calls) {}
  std::optional<int64_t> next() {
    ++calls.reads;
    return Random::next();
  }
  void skip(int64_t samples) {
    ++calls.skips;
    draw.discard(static_cast<unsigned long long>(samples));
    left -= static_cast<int>(samples);
  }
  Calls& calls;
};

/// Receives `steps` batches in a loop, then what is left in another loader that has loaded the state.
template <class Open>
std::vector<Batches64> in_two_loops(int ranks, const Open& open, const StreamLoaderOptions& options, size_t steps,
                                    int workers_later) {
  return on_ranks<Batches64>(ranks, [&](const ProcessGroup& world) {
    StreamLoader<Open> first(open, world, options);
    first.set_epoch(6);
    auto received = received_from(first, steps);
    auto changed = options;
    changed.num_workers = workers_later;
    StreamLoader<Open> second(open, world, changed);
    second.load_state_dict(first.state_dict());
    EXPECT_EQ(second.epoch(), 6);
    const bool is_over = second.next_epoch() == 7;
    second.set_epoch(second.next_epoch());  // as a program does; changes nothing inside of an epoch
    if (!is_over)
      for (auto& batch : received_from(second)) received.push_back(std::move(batch));
    EXPECT_EQ(second.next_epoch(), is_over ? 7 : second.epoch() + 1);
    return received;
  });
}

class StreamEnds : public testing::TestWithParam<StreamEnd> {};
INSTANTIATE_TEST_SUITE_P(, StreamEnds, testing::Values(StreamEnd::kTogether, StreamEnd::kEach),
                         [](const auto& info) { return info.param == StreamEnd::kEach ? "each" : "together"; });

TEST_P(StreamEnds, ContinueAfterTheBatchThatTheLoopHad) {
  const auto open = [](const StreamPart& part) { return Random(part); };
  for (const int64_t max_batches : {0, 4})
    for (const int workers : {0, 1, 3}) {
      const StreamLoaderOptions options{.batch_size = 2,
                                        .num_workers = workers,
                                        .prefetch_factor = 3,
                                        .parts = 6,
                                        .seed = 9,
                                        .end = GetParam(),
                                        .max_batches = max_batches};
      const auto whole = epoch_of(2, open, options, 6);
      const size_t most = std::max(whole[0].size(), whole[1].size());
      EXPECT_EQ(most, max_batches > 0 ? 4u : GetParam() == StreamEnd::kEach ? 15u : 12u);
      for (size_t steps = 0; steps <= most + 1; ++steps) {
        SCOPED_TRACE(testing::Message() << workers << " workers, after " << steps << " of " << most);
        EXPECT_EQ(in_two_loops(2, open, options, steps, 2), whole);
      }
    }
}

TEST(StreamPosition, SkipsWithoutReading) {
  Jumping::Calls calls;
  const auto open = [&](const StreamPart& part) { return Jumping(part, calls); };
  const StreamLoaderOptions options{.batch_size = 2, .num_workers = 0, .parts = 4, .end = StreamEnd::kEach};
  const auto whole = epoch_of(1, open, options, 6);  // 3 + 5 + 7 + 9 samples
  EXPECT_EQ(calls.reads, 24 + 4);
  EXPECT_EQ(calls.skips, 0);
  for (size_t steps = 0; steps <= whole[0].size(); ++steps) {
    calls.reads = calls.skips = 0;
    EXPECT_EQ(in_two_loops(1, open, options, steps, 0), whole);
    // Once more for a part whose end the first loop has not seen before its last batch.
    EXPECT_LE(calls.reads, 24 + 4 + 1);
    EXPECT_LE(calls.skips, 4);
    EXPECT_EQ(calls.skips > 0, steps > 0);
  }
}

TEST(StreamPosition, ContinuesOnAnotherNumberOfRanks) {
  const Numbers64 lengths{5, 0, 13, 4, 8, 1};
  const auto open = of_lengths(lengths);
  for (size_t steps = 0; steps <= 5; ++steps) {
    std::mutex mutex;
    std::map<int64_t, int> seen;
    Value state;
    for (const auto& [ranks, most] :
         {std::pair(3, steps), std::pair(2, size_t{2}), std::pair(6, size_t{1}), std::pair(1, SIZE_MAX)}) {
      run_threads(ranks, [&, most = most](ProcessGroup world) {
        StreamLoader loader(open, world,
                            {.batch_size = 2, .num_workers = 2, .parts = 6, .seed = 3, .end = StreamEnd::kEach});
        if (!state.is_none()) loader.load_state_dict(state);
        const auto received = received_from(loader, most);
        auto saved = loader.state_dict();
        const std::lock_guard lock(mutex);
        for (const auto& batch : received)
          for (int64_t number : batch) ++seen[number];
        if (world.rank() == 0) state = std::move(saved);
      });
    }
    EXPECT_EQ(seen.size(), 31u) << steps;
    for (const auto& [number, times] : seen) EXPECT_EQ(times, 1) << number;
    EXPECT_TRUE(state.at("finished").as_bool());
  }
}

TEST(StreamPosition, CountsTheStepsOfAnEpochOnAnotherNumberOfRanks) {
  Value state;
  const auto receive = [&](int ranks, size_t most) {
    return on_ranks<Batches64>(ranks, [&](const ProcessGroup& world) {
      StreamLoader loader(dealt(1'000'000), world, {.parts = 2, .max_batches = 5});
      if (!state.is_none()) loader.load_state_dict(state);
      auto received = received_from(loader, most);
      const auto saved = loader.state_dict();
      if (world.rank() == 0) state = saved;
      return received;
    });
  };
  EXPECT_THAT(receive(2, 3)[1], ElementsAre(Numbers64{1}, Numbers64{3}, Numbers64{5}));
  EXPECT_THAT(receive(1, SIZE_MAX)[0], ElementsAre(Numbers64{6}, Numbers64{7}));
}

TEST(StreamPosition, IsThatOfAllParts) {
  run_threads(2, [](ProcessGroup world) {
    StreamLoader loader(of_lengths({4, 9, 1, 9}), world, {.batch_size = 2, .parts = 4, .seed = 5});
    loader.set_epoch(3);
    received_from(loader, 3);
    const auto state = loader.state_dict();
    EXPECT_EQ(state, Value::dict({{"epoch", 3},
                                  {"finished", false},
                                  {"parts", 4},
                                  {"batch_size", 2},
                                  {"seed", 5},
                                  {"steps", Value::list({3, 3})},
                                  {"samples", Value::list({4, 4, 1, 2})},
                                  {"ended", Value::list({false, false, false, false})}}))
        << state;
    loader.set_epoch(4);
    const auto next = loader.state_dict();
    EXPECT_EQ(next.at("epoch"), Value(4)) << "the epoch that set_epoch() has left is over";
    EXPECT_EQ(next.at("samples"), Value::list({0, 0, 0, 0}));

    loader.load_state_dict(state);
    EXPECT_EQ(loader.state_dict(), state);
    EXPECT_EQ(received_from(loader).size(), 0u) << "rank 0 has had all";
    EXPECT_EQ(loader.next_epoch(), 4);
    const auto finished = loader.state_dict();
    EXPECT_TRUE(finished.at("finished").as_bool());
    StreamLoader other(of_lengths({4, 9}), world);  // after the end of an epoch anything may differ
    other.load_state_dict(finished);
    EXPECT_EQ(other.next_epoch(), 4);
    received_from(other, 1);
    EXPECT_EQ(other.next_epoch(), 3) << "the epoch begins again";
    other.load_state_dict(finished);
    EXPECT_EQ(received_from(other).size(), 4u);
  });
}

TEST(StreamPosition, IsDiscardedByAnotherEpoch) {
  run_threads(2, [](ProcessGroup world) {
    StreamLoader loader(dealt(12), world, {.batch_size = 2});
    received_from(loader, 2);
    const auto state = loader.state_dict();
    loader.load_state_dict(state);
    loader.set_epoch(1);
    EXPECT_EQ(received_from(loader).size(), 3u);
    loader.load_state_dict(state);
    EXPECT_EQ(received_from(loader).size(), 1u);
    EXPECT_EQ(received_from(loader).size(), 3u) << "only the first loop after loading continues";
  });
}

TEST(StreamPosition, IsRefusedIfItIsOfOtherBatches) {
  run_threads(2, [](ProcessGroup world) {
    StreamLoader loader(dealt(40), world, {.batch_size = 2, .parts = 4});
    received_from(loader, 3);
    const auto state = loader.state_dict();
    const auto refused = [&](const StreamLoaderOptions& options) {
      StreamLoader other(dealt(40), world, options);
      const auto error = error_of<UsageError>([&] { other.load_state_dict(state); });
      EXPECT_EQ(numbers_received(*other.begin()).front(), world.rank()) << "nothing has changed";
      return error;
    };
    const auto rank = "rank " + std::to_string(world.rank());
    EXPECT_EQ(refused({.batch_size = 2, .parts = 2}),
              rank +
                  ": StreamLoader: the saved position is inside an epoch with parts 4, this loader has parts 2; set "
                  "parts to 4, or resume from the end of an epoch");
    EXPECT_THAT(refused({.batch_size = 3, .parts = 4}),
                HasSubstr("inside an epoch with batch_size 2, this loader has batch_size 3; set batch_size to 2"));
    EXPECT_THAT(refused({.batch_size = 2, .parts = 4, .seed = 1}), HasSubstr("with seed 0, this loader has seed 1"));

    auto damaged = state;
    damaged.at("samples").elements().pop_back();
    EXPECT_THAT(error_of<UsageError>([&] { loader.load_state_dict(damaged); }),
                HasSubstr("has 3 numbers in 'samples' of 4 parts"));
    damaged = state;
    damaged.at("samples").elements()[1] = -2;
    EXPECT_THAT(error_of<UsageError>([&] { loader.load_state_dict(damaged); }), HasSubstr("has a negative 'samples'"));
    damaged = state;
    damaged.set("epoch", -1);
    EXPECT_THAT(error_of<UsageError>([&] { loader.load_state_dict(damaged); }), HasSubstr("has epoch -1"));
    EXPECT_THROW(loader.load_state_dict(Value::dict()), UsageError);
    EXPECT_EQ(loader.state_dict(), state);
  });
}

TEST(StreamPosition, IsRefusedIfTheDataHasBecomeShorter) {
  run_threads(2, [](ProcessGroup world) {
    StreamLoader loader(of_lengths({9, 9}), world, {.batch_size = 3});
    received_from(loader, 2);
    StreamLoader shorter(of_lengths({9, 5}), world, {.batch_size = 3});
    shorter.load_state_dict(loader.state_dict());
    EXPECT_EQ(error_of<UsageError>([&] { shorter.begin(); }),
              "rank 1: StreamLoader: epoch 0: part 1: the stream ends after 5 samples, but 6 were received before the "
              "state was saved; resume with the same data");
  });
}

TEST(StreamPosition, IsKeptInACheckpoint) {
  for (const bool asynchronous : {false, true}) {
    const TemporaryFolder folder;
    run_threads(2, [&](ProcessGroup world) {
      StreamLoader loader(of_lengths({2, 7, 6, 9}), world, {.batch_size = 2, .parts = 4});
      CheckpointDirectory checkpoints(world, folder.path(), {.asynchronous = asynchronous});
      loader.set_epoch(2);
      received_from(loader, 2);
      checkpoints.save(2, TrainingState{}.add("data", loader));
    });
    run_threads(1, [&](ProcessGroup world) {
      StreamLoader loader(of_lengths({2, 7, 6, 9}), world, {.batch_size = 2, .parts = 4});
      CheckpointDirectory checkpoints(world, folder.path());
      EXPECT_EQ(checkpoints.resume(TrainingState{}.add("data", loader)), 3);
      EXPECT_EQ(loader.next_epoch(), 2);
      const auto rest = received_from(loader);
      EXPECT_THAT(Batches64(rest.begin(), rest.begin() + 3),
                  ElementsAre(Numbers64{1002, 1003}, Numbers64{2002, 2003}, Numbers64{3002, 3003}));
      EXPECT_EQ(rest.size(), 3u + 2 + 4);
    });
  }
}

}  // namespace
}  // namespace lockstep
