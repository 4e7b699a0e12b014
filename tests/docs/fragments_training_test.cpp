// Snippets of the README and of the pages about data and checkpoints.

#include <signal.h>

#include <algorithm>
#include <fstream>
#include <numeric>
#include <set>

#include <gmock/gmock.h>

#include "fragments.h"

#include "report/records.h"

namespace {

using testing::ElementsAre;

TEST(Readme, TrainsAndResumes) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    const auto train = [&](int64_t epochs) {
      auto net = seeded_net();
      lockstep::DistributedDataParallel ddp(net, world);
      lockstep::DataLoader loader(Samples(), lockstep::DistributedSampler(24, world), {.batch_size = 4});
      torch::optim::SGD optimizer(ddp.parameters(), 0.005);
#include "README/with_checkpoints_and_resuming.inc"
    };
    EXPECT_EQ(train(2), 0);
    EXPECT_EQ(train(5), 0);
    if (world.rank() != 0) return;
    const auto epochs = records_of("runs/a", "epoch");
    ASSERT_EQ(epochs.size(), 5);
    EXPECT_LT(epochs.back().at("loss"), epochs.front().at("loss"));
  });
}

// --- compiled models

TEST(CompiledPage, NeedsAFile) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    const auto train = [&] {
      lockstep::DataLoader loader(Samples(), {.batch_size = 4});
#include "docs/compiled/train.inc"
      const auto [images, labels] = Samples().slice(0, 4);
#include "docs/compiled/train_2.inc"
    };
    EXPECT_THROW(train(), lockstep::Error);
  });
}

// --- data

using Indices = std::vector<int64_t>;

Indices sorted(Indices indices) {
  std::sort(indices.begin(), indices.end());
  return indices;
}

/// Returns the numbers of all ranks, in order of rank.
Indices gathered(const lockstep::ProcessGroup& world, const Indices& mine) {
  Indices all;
  for (const auto& of_rank : world.all_gather_object(mine))
    for (const int64_t index : of_rank.toIntVector()) all.push_back(index);
  return all;
}

TEST(DataPage, EveryEpochHasAllSamplesInAnotherOrder) {
  on_two_ranks([](const lockstep::ProcessGroup& group) {
    const Samples dataset;
    const int epochs = 2;
    std::vector<Indices> seen;
    const auto train = [&](const Tensor& data, const Tensor& target) {
      seen.push_back(indices_of(data));
      EXPECT_TRUE(target.equal(data.select(1, 0).to(torch::kLong) % 4));
    };
#include "docs/data/data.inc"
    ASSERT_EQ(seen.size(), 2);  // a batch of 12 samples in each epoch
    EXPECT_NE(seen[0], seen[1]);
    Indices all(24);
    std::iota(all.begin(), all.end(), 0);
    for (const auto& epoch : seen) EXPECT_EQ(sorted(gathered(group, epoch)), all);
  });
}

using Sentence = std::vector<int64_t>;
using Padded = Tensor;

/// Sentences of 1 to 4 words.
struct Sentences {
  size_t size() const { return 24; }
  Sentence get(size_t index) const { return Sentence(index % 4 + 1, static_cast<int64_t>(index + 1)); }
};

Padded padded(const std::vector<Sentence>& sentences) {
  auto batch = torch::zeros({static_cast<int64_t>(sentences.size()), 4}, torch::kLong);
  for (size_t i = 0; i < sentences.size(); ++i)
    batch[static_cast<int64_t>(i)].slice(0, 0, static_cast<int64_t>(sentences[i].size())) = torch::tensor(sentences[i]);
  return batch;
}

TEST(DataPage, ACollateFunctionMakesBatches) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    const Sentences dataset;
    lockstep::DistributedSampler sampler(dataset, world);
#include "docs/data/batches.inc"
    int64_t words = 0;
    for (Padded& batch : loader) words += batch.ne(0).sum().item<int64_t>();
    EXPECT_EQ(world.all_reduce(words), 6 * (1 + 2 + 3 + 4));
  });
}

TEST(DataPage, PartsAreDividedBetweenRanks) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    const Samples dataset;
#include "docs/data/parts_of_a_dataset.inc"
    Indices trained, evaluated;
    for (auto& batch : loader)
      for (const int64_t index : indices_of(batch.data)) trained.push_back(index);
    for (auto& batch : evaluation)
      for (const int64_t index : indices_of(batch.data)) evaluated.push_back(index);
    trained = gathered(world, trained);
    evaluated = gathered(world, evaluated);
    EXPECT_EQ(sorted(evaluated), sorted(Indices(validation.indices().begin(), validation.indices().end())));
    trained.insert(trained.end(), evaluated.begin(), evaluated.end());
    Indices all(24);
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(sorted(trained), all);
    EXPECT_EQ(indices_of(hardest.get(1).data.unsqueeze(0)), Indices{3});
  });
}

TEST(DataPage, LibTorchsLoaderTakesTheSampler) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    auto dataset = LibTorchSamples().map(torch::data::transforms::Stack<>());
    const int epochs = 2;
    Indices seen;
    const auto train = [&](const Example<>& batch) {
      for (const int64_t index : indices_of(batch.data)) seen.push_back(index);
    };
#include "docs/data/libtorch_s_data_loader.inc"
    Indices expected;
    for (int64_t epoch = 0; epoch < epochs; ++epoch)
      for (const size_t index : lockstep::distributed_indices(24, world.rank(), 2, {.seed = 1}, epoch))
        expected.push_back(static_cast<int64_t>(index));
    EXPECT_EQ(seen, expected);
  });
}

/// Sample 0 is the only one of class 1.
struct RareClass {
  size_t size() const { return 24; }
  Tensor get(size_t index) const { return torch::tensor(static_cast<int64_t>(index)); }
  Tensor targets() const { return torch::arange(24).eq(0).to(torch::kLong); }
};

TEST(DataPage, WeightsBalanceTheClasses) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    const RareClass dataset;
#include "docs/data/other_orders.inc"
    int64_t rare = 0, draws = 0;
    for (int64_t epoch = 0; epoch < 50; ++epoch) {
      sampler.set_epoch(epoch);
      for (const size_t sample : sampler.indices()) {
        rare += sample == 0 ? 1 : 0;
        ++draws;
      }
    }
    EXPECT_NEAR(static_cast<double>(rare) / static_cast<double>(draws), 0.5, 0.06);
  });
}

TEST(DataPage, AnOrderMayGrowWithTheEpochs) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    std::vector<size_t> by_difficulty(2500);
    std::iota(by_difficulty.rbegin(), by_difficulty.rend(), 0);
    const size_t dataset = by_difficulty.size();
#include "docs/data/other_orders_2.inc"
    for (const auto& [epoch, samples] : {std::pair(0, 500), std::pair(1, 1000), std::pair(2, 1250)}) {
      sampler.set_epoch(epoch);
      EXPECT_EQ(sampler.indices().size(), static_cast<size_t>(samples));
      EXPECT_EQ(sampler.indices()[0], 2499 - static_cast<size_t>(world.rank()));
    }
  });
}

/// Sequences of 1 to 100 elements.
struct Sequences {
  size_t size() const { return 640; }
  Example<> get(size_t index) const {
    return {torch::ones({static_cast<int64_t>(index * 37 % 100) + 1}), torch::tensor(0)};
  }
};

TEST(DataPage, StepsOfSimilarLengthsNeedLittlePadding) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    const Sequences dataset;
    std::vector<int64_t> lengths;
    for (size_t i = 0; i < dataset.size(); ++i) lengths.push_back(dataset.get(i).data.size(0));
    int64_t places = 0, elements = 0;
    const auto train = [&](const Tensor& data, const Tensor& mask, const Tensor& target) {
      places += data.numel();
      elements += mask.sum().item<int64_t>();
      EXPECT_EQ(data.size(1) % 8, 0);
      EXPECT_EQ(target.numel(), 32);
    };
#include "docs/data/batches_2.inc"
    EXPECT_EQ(world.all_reduce(elements), std::accumulate(lengths.begin(), lengths.end(), int64_t{0}));
    EXPECT_LT(static_cast<double>(places), 1.25 * static_cast<double>(elements));
  });
}

struct Shifted {
  size_t size() const { return 24; }
#include "docs/data/random_numbers.inc"
  Tensor images = torch::arange(24 * 16, torch::kFloat).reshape({24, 1, 4, 4});
  Tensor targets = torch::arange(24);
};

TEST(DataPage, RandomNumbersDependOnTheSampleAndTheEpoch) {
  const auto epoch_of = [](int workers, int64_t epoch) {
    lockstep::DistributedSampler sampler(24, 0, 1);
    sampler.set_epoch(epoch);
    lockstep::DataLoader loader(Shifted(), sampler, {.batch_size = 24, .num_workers = workers});
    Tensor images;
    for (auto& batch : loader) images = batch.data.index_select(0, batch.target.argsort());
    return images;
  };
  EXPECT_TRUE(epoch_of(2, 1).equal(epoch_of(0, 1)));
  EXPECT_FALSE(epoch_of(2, 1).equal(epoch_of(2, 2)));
}

TEST(DataPage, EachRankMayHaveDataOfItsOwn) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    const lockstep::Subset my_samples(Samples(),
                                      world.rank() == 0 ? std::vector<size_t>{3, 1} : std::vector<size_t>{7});
    const int epochs = 3;
    std::multiset<int64_t> seen;
    const auto train = [&](const Tensor& data, const Tensor&) {
      for (const int64_t index : indices_of(data)) seen.insert(index);
    };
#include "docs/data/data_of_each_rank.inc"
    const std::multiset<int64_t> expected{1, 1, 1, 3, 3, 3};
    EXPECT_EQ(seen, world.rank() == 0 ? expected : (std::multiset<int64_t>{7, 7, 7}));
  });
}

TEST(DataPage, AnEpochContinuesInTheMiddle) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    const Samples dataset;
    const int64_t epochs = 2;
    Indices seen;
    const auto train = [&](const Example<>& batch) {
      for (const int64_t index : indices_of(batch.data)) seen.push_back(index);
    };
    {
      lockstep::DistributedSampler sampler(dataset, world);
      lockstep::DataLoader loader(dataset, sampler, {.batch_size = 4});
      for (auto& batch : loader) {
        train(batch);
#include "docs/data/resuming_in_the_middle_of_an_epoch.inc"
        break;
      }
    }
    world.barrier();
    lockstep::DistributedSampler sampler(dataset, world);
    lockstep::DataLoader loader(dataset, sampler, {.batch_size = 4});
#include "docs/data/resuming_in_the_middle_of_an_epoch_2.inc"
    Indices expected;
    for (int64_t epoch = 0; epoch < epochs; ++epoch)
      for (const size_t index : lockstep::distributed_indices(24, world.rank(), 2, {}, epoch))
        expected.push_back(static_cast<int64_t>(index));
    EXPECT_EQ(seen, expected);
  });
}

Tensor parsed(const std::string& line) {
  return torch::tensor(int64_t{std::stoll(line)});
}

#include "docs/data/streams.inc"

/// Writes the numbers below `count`, one in each line. Collective.
void write_events(const lockstep::ProcessGroup& world, int64_t count) {
  if (world.rank() == 0) {
    std::ofstream file("events.log");
    for (int64_t i = 0; i < count; ++i) file << i << '\n';
  }
  world.barrier();
}

TEST(DataPage, StreamsAreDividedBetweenRanksAndWorkers) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    write_events(world, 4 * 64 + 4 * 10);
    const int epochs = 2;
    Indices seen;
    const auto train = [&](const Tensor& batch) {
      for (int64_t i = 0; i < batch.numel(); ++i) seen.push_back(batch[i].item<int64_t>());
    };
#include "docs/data/streams_2.inc"
    ASSERT_EQ(seen.size(), 2 * 148);
    Indices expected(296);
    std::iota(expected.begin(), expected.end(), 0);
    for (const auto& epoch : {Indices(seen.begin(), seen.begin() + 148), Indices(seen.begin() + 148, seen.end())})
      EXPECT_EQ(sorted(gathered(world, epoch)), expected);
  });
}

TEST(DataPage, AStreamContinuesInTheMiddle) {
  struct Stopped {};
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    write_events(world, 1400);
    const int64_t epochs = 2;  // of 700 steps
    Indices seen;
    const auto run = [&](size_t stopped_after) {
      auto net = seeded_net();
      const auto open = [](const lockstep::StreamPart& part) { return EventLog("events.log", part); };
      lockstep::StreamLoader loader(open, world);
      const auto train = [&](const Tensor& batch) {
        if (seen.size() == stopped_after) throw Stopped();
        seen.push_back(batch[0].item<int64_t>());
      };
#include "docs/data/resuming_a_stream.inc"
    };
    EXPECT_THROW(run(1010), Stopped);
    ASSERT_EQ(seen.size(), 1010);
    seen.resize(1000);  // the last checkpoint
    run(10000);
    Indices expected;
    for (int64_t epoch = 0; epoch < epochs; ++epoch)
      for (int64_t number = world.rank(); number < 1400; number += 2) expected.push_back(number);
    EXPECT_EQ(seen, expected);
  });
}

void train(const Tensor&, const Tensor&) {}

// On eight ranks, with a file of another host.
[[maybe_unused]] void read_for_a_host(const lockstep::ProcessGroup& world, size_t size) {
#include "docs/data/grouploader.inc"
}

struct Captions {
  Tensor images;
  std::vector<std::string> texts;
};

}  // namespace

#include "docs/data/batches_that_can_be_sent.inc"

namespace {

TEST(DataPage, ABatchWithATraitOfItsOwnIsSentWhole) {
  on_two_ranks([](const lockstep::ProcessGroup& group) {
    const auto collate = [](std::vector<torch::data::Example<>> samples) {
      return Captions{lockstep::Stack()(samples).data, std::vector<std::string>(samples.size(), "a caption")};
    };
    lockstep::GroupLoader loader([] { return Samples(); }, lockstep::DistributedSampler(24, group), {.scatter = group},
                                 collate, {.batch_size = 12});
    for (Captions& batch : loader) {
      EXPECT_EQ(batch.images.size(0), 12);
      EXPECT_EQ(batch.texts, std::vector<std::string>(12, "a caption"));
    }
  });
}

[[maybe_unused]] void stage_a_file(const lockstep::ProcessGroup& world) {
#include "docs/data/staging_files_to_the_local_disk.inc"
  EXPECT_GT(*dataset.size(), 0);
}

[[maybe_unused]] void read_fashion_mnist() {
#include "docs/data/idx.inc"
  EXPECT_EQ(example.target.dim(), 0);
}

std::string decoded(std::string_view value) {
  return std::string(value);
}

TEST(DataPage, DatabasesHaveTheSamplesThatWereWritten) {
#ifndef LOCKSTEP_HAVE_LMDB
  GTEST_SKIP() << "this build has no LMDB";
#endif
  const TemporaryFolder folder;
  const CurrentFolder current(folder.path());
  const std::vector<Tensor> images{torch::arange(6), torch::arange(6, 12)}, targets{torch::tensor(1), torch::tensor(2)};
  lockstep::LmdbWriter caffe("caffe.lmdb");
  caffe.add("cat");
  caffe.finish();
#include "docs/data/lmdb.inc"
  ASSERT_EQ(dataset.size(), 2);
  EXPECT_TRUE(dataset.get(1).data.equal(images[1]));
  EXPECT_TRUE(dataset.get(1).target.equal(targets[1]));
  EXPECT_EQ(mine.get(0), "cat");
}

// --- checkpoints

TEST(CheckpointsPage, AResumedRunHasTheSameBits) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    const auto trained = [&](const std::string& folder, int64_t epochs) {
      const CurrentFolder current(folder);
      auto net = seeded_net();
      lockstep::DistributedDataParallel ddp(net, world);
      torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
      lockstep::LRScheduler scheduler(optimizer, lockstep::schedules::exponential({.gamma = 0.5}));
      const Samples dataset;
      lockstep::DistributedSampler sampler(dataset, world);
      lockstep::DataLoader loader(dataset, sampler, {.batch_size = 4});
      const auto train = [&](int64_t epoch) {
        sampler.set_epoch(epoch);
        for (auto& batch : loader) step(ddp, optimizer, {batch.data + torch::randn({4, 6}), batch.target});
        scheduler.step();
      };
      const auto evaluate = [&] { return 1.0 / static_cast<double>(scheduler.last_step()); };
#include "docs/checkpoints/checkpoints.inc"
      EXPECT_TRUE(std::filesystem::exists("runs/a/best.pt"));
      EXPECT_EQ(checkpoints.numbers().back(), epochs - 1);
      return torch::nn::utils::parameters_to_vector(net->parameters()).detach();
    };
    trained("parts", 2);
    EXPECT_TRUE(trained("parts", 4).equal(trained("whole", 4)));
  });
}

struct Killed {};

TEST(CheckpointsPage, AStepIsFollowedByTheNextOne) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    const int64_t epochs = 86;  // of 12 steps
    Indices seen;
    const auto run = [&](size_t killed_after) {
      const Samples dataset;
      lockstep::DistributedSampler sampler(dataset, world);
      lockstep::DataLoader loader(dataset, sampler, {.num_workers = 0});
      auto state = lockstep::TrainingState{}.add("sampler", sampler);
      const auto train = [&](const Example<>& batch) {
        if (seen.size() == killed_after) throw Killed();
        seen.push_back(indices_of(batch.data)[0]);
      };
#include "docs/checkpoints/in_the_middle_of_an_epoch.inc"
    };
    EXPECT_THROW(run(1010), Killed);
    ASSERT_EQ(seen.size(), 1010);
    seen.resize(1000);  // the last checkpoint
    run(10000);
    Indices expected;
    for (int64_t epoch = 0; epoch < epochs; ++epoch)
      for (const size_t index : lockstep::distributed_indices(24, world.rank(), 2, {}, epoch))
        expected.push_back(static_cast<int64_t>(index));
    EXPECT_EQ(seen, expected);
  });
}

TEST(CheckpointsPage, AllRanksStopAfterTheSameStep) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    lockstep::CheckpointDirectory checkpoints(world, "runs/a");
    int64_t step = 0;
    const int64_t steps = 10;
    double loss = 0;
    const auto state = lockstep::TrainingState{}.add("loss", loss);
    const auto train = [&](int64_t number) {
      if (number == 3 && world.rank() == 1) ::raise(SIGUSR1);
    };
    const auto run = [&] {
#include "docs/checkpoints/preemption.inc"
      return 0;
    };
    EXPECT_EQ(run(), 6);
    EXPECT_EQ(step, 3);
    EXPECT_THAT(checkpoints.numbers(), ElementsAre(3));
  });
}

TEST(CheckpointsPage, AFileRestoresAModel) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    const CurrentFolder current(std::to_string(world.rank()));
    auto net = seeded_net();
#include "docs/checkpoints/files_without_a_directory.inc"
    EXPECT_EQ(value.at("epoch").as_int(), 3);
    Net other;
    lockstep::load_state_dict(*other, value.at("model"));
    expect_equal_parameters(other, net);
  });
}

}  // namespace
