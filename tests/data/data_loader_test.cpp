#include <lockstep/data_loader.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/data/datasets.h>
#include <torch/data/transforms.h>
#include <torch/torch.h>

#include <lockstep/error.h>

#include "data/through_archive.h"
#include "support/forked.h"
#include "support/log_lines.h"
#include "support/messages.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using torch::data::Example;
using Indices = std::vector<size_t>;

constexpr DistributedSamplerOptions kUnshuffled = {.shuffle = false};

// Sample i is i, and its target 10 i.
struct Numbers : torch::data::datasets::Dataset<Numbers> {
  explicit Numbers(size_t count) : count(count) {}
  Example<> get(size_t index) override {
    const auto number = static_cast<int64_t>(index);
    return {torch::tensor(number), torch::tensor(10 * number)};
  }
  torch::optional<size_t> size() const override { return count; }
  size_t count;
};

// Sample i is i and a number drawn for it.
struct Augmented {
  at::Tensor get(size_t index, at::Generator& random) {
    return torch::cat({torch::tensor({static_cast<double>(index)}), torch::rand({1}, random, torch::kDouble)});
  }
};

// Reads what a function says; copies call the same one.
template <class Sample>
struct Told {
  Sample get(size_t index) { return read(index); }
  std::function<Sample(size_t)> read;
};

Indices numbers_in(const at::Tensor& batch) {
  const auto numbers = batch.to(torch::kLong).contiguous();
  return {numbers.data_ptr<int64_t>(), numbers.data_ptr<int64_t>() + numbers.numel()};
}

template <class Loader>
std::vector<Indices> indices_of_batches(Loader& loader) {
  std::vector<Indices> all;
  for (auto& batch : loader) all.push_back(numbers_in(batch.data));
  return all;
}

class DataLoaderWorkers : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(, DataLoaderWorkers, testing::Values(0, 1, 2, 5));

TEST_P(DataLoaderWorkers, DeliverTheSamplersBatchesInOrder) {
  DistributedSampler sampler(103, 1, 2, {.seed = 3});
  DataLoader loader(Numbers(103), sampler, {.batch_size = 8, .num_workers = GetParam()});
  EXPECT_EQ(loader.size(), 7);  // 52 samples
  for (int epoch : {0, 1, 2}) {
    sampler.set_epoch(epoch);
    const auto expected = distributed_indices(103, 1, 2, {.seed = 3}, epoch);
    Indices delivered;
    size_t batches = 0;
    for (auto& batch : loader) {
      EXPECT_TRUE(torch::equal(batch.target, 10 * batch.data));
      const auto numbers = numbers_in(batch.data);
      EXPECT_EQ(numbers.size(), ++batches < 7 ? 8u : 4u);
      delivered.insert(delivered.end(), numbers.begin(), numbers.end());
    }
    EXPECT_EQ(batches, 7u);
    EXPECT_EQ(delivered, expected);
  }
}

TEST_P(DataLoaderWorkers, DrawTheSameNumbersForASample) {
  const auto drawn = [](int workers, int rank, int ranks, uint64_t seed, int64_t epoch) {
    DistributedSampler sampler(20, rank, ranks, {.seed = seed});
    sampler.set_epoch(epoch);
    std::map<size_t, double> numbers;
    DataLoader loader(Augmented(), sampler, {.batch_size = 3, .num_workers = workers});
    for (auto& batch : loader)
      for (int64_t i = 0; i < batch.size(0); ++i) numbers[batch[i][0].item<int64_t>()] = batch[i][1].item<double>();
    return numbers;
  };
  const auto alone = drawn(0, 0, 1, 7, 2);
  EXPECT_EQ(drawn(GetParam(), 0, 1, 7, 2), alone);
  auto together = drawn(GetParam(), 0, 2, 7, 2);
  together.merge(drawn(GetParam(), 1, 2, 7, 2));
  EXPECT_EQ(together, alone);

  std::set<double> different;
  for (const auto& [seed, epoch] : {std::pair(7, 2), std::pair(7, 3), std::pair(8, 2)})
    for (const auto& [sample, number] : drawn(GetParam(), 0, 1, seed, epoch)) different.insert(number);
  EXPECT_EQ(different.size(), 60u);
}

TEST_P(DataLoaderWorkers, ContinueAfterTheBatchThatTheLoopHad) {
  const DataLoaderOptions options{.batch_size = 4, .num_workers = GetParam(), .prefetch_factor = 3};
  DistributedSampler first(40, 0, 2, {.seed = 5}), second(40, 0, 2, {.seed = 5});
  first.set_epoch(6);
  DataLoader loader(Augmented(), first, options);
  std::vector<at::Tensor> rest;
  size_t had = 0;
  for (auto& batch : loader) {
    if (++had > 2) {
      rest.push_back(batch);
      continue;
    }
    EXPECT_EQ(first.position(), 4 * had);
    if (had == 2) through_archive(first, second);
  }
  ASSERT_EQ(rest.size(), 3u);

  DataLoader resumed(Augmented(), second, options);
  EXPECT_EQ(second.next_epoch(), 6);
  second.set_epoch(6);  // the loop's own call changes nothing
  size_t next = 0;
  for (auto& batch : resumed) EXPECT_TRUE(torch::equal(batch, rest.at(next++)));
  EXPECT_EQ(next, 3u);
  EXPECT_EQ(second.position(), 20u);
  EXPECT_EQ(second.next_epoch(), 7);
  for (auto& batch : resumed) next += static_cast<size_t>(batch.size(0));
  EXPECT_EQ(next, 23u) << "the loop after that has a whole epoch";
}

TEST_P(DataLoaderWorkers, BeginTheEpochAgainWhenALoopWasLeft) {
  DistributedSampler sampler(6, 0, 1, kUnshuffled);
  DataLoader loader(Numbers(6), sampler, {.batch_size = 2, .num_workers = GetParam()});
  for (auto& batch : loader)
    if (numbers_in(batch.data).front() == 2) break;
  EXPECT_THAT(indices_of_batches(loader), ElementsAre(Indices{0, 1}, Indices{2, 3}, Indices{4, 5}));
}

TEST_P(DataLoaderWorkers, LeaveOutASmallerBatchWhenTold) {
  DistributedSampler sampler(7, 0, 1, kUnshuffled), other(7, 0, 1, kUnshuffled);
  DataLoader loader(Numbers(7), sampler, {.batch_size = 3, .drop_last = true, .num_workers = GetParam()});
  EXPECT_EQ(loader.size(), 2);
  EXPECT_THAT(indices_of_batches(loader), ElementsAre(Indices{0, 1, 2}, Indices{3, 4, 5}));
  through_archive(sampler, other);  // of an epoch that is over
  DataLoader next(Numbers(7), other, {.batch_size = 4, .num_workers = GetParam()});
  EXPECT_THAT(indices_of_batches(next), ElementsAre(Indices{0, 1, 2, 3}, Indices{4, 5, 6}));
}

TEST_P(DataLoaderWorkers, ThrowWhatADatasetThrowsWhenItsBatchIsDue) {
  std::atomic<bool> fails = true;
  Told<at::Tensor> dataset{[&](size_t index) {
    if (fails && index == 7) throw std::out_of_range("a page is torn");
    return torch::tensor(static_cast<int64_t>(index));
  }};
  DistributedSampler sampler(12, 0, 1, kUnshuffled);
  sampler.set_epoch(4);
  DataLoader loader(dataset, sampler, {.batch_size = 2, .num_workers = GetParam(), .prefetch_factor = 4});
  size_t delivered = 0;
  auto batch = loader.begin();
  try {
    for (; batch != loader.end(); ++batch) delivered += numbers_in(*batch).size();
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "rank 0: DataLoader: epoch 4: sample 7: a page is torn");
    EXPECT_TRUE(holds<std::out_of_range>(error));
  }
  EXPECT_EQ(delivered, 6u);
  EXPECT_EQ(sampler.position(), 6u);
  ++batch;
  EXPECT_TRUE(batch == loader.end()) << "the loop is over";

  fails = false;
  for (auto& each : loader) delivered += numbers_in(each).size();
  EXPECT_EQ(delivered, 18u);
}

TEST_P(DataLoaderWorkers, NameTheSamplesThatMakeNoBatch) {
  Told<Example<>> dataset{[](size_t index) {
    const auto length = index == 5 ? 3 : 2;
    return Example<>(torch::zeros(length), torch::tensor(0));
  }};
  DataLoader loader(dataset, DistributedSampler(8, 0, 1, kUnshuffled), {.batch_size = 4, .num_workers = GetParam()});
  EXPECT_THAT(
      error_of<UsageError>([&] {
        for (auto& batch : loader) EXPECT_EQ(batch.data.size(1), 2);
      }),
      AllOf(HasSubstr("rank 0: DataLoader: epoch 0: samples 4 5 6 7: the samples cannot be stacked: the data of "
                      "sample 1 in the batch is a tensor of shape [3], Float, on cpu"),
            HasSubstr("sample 0 is a tensor of shape [2], Float"), HasSubstr("collate function")));
}

TEST(DataLoader, ReadsAheadAndNoFurtherThanItMay) {
  std::mutex mutex;
  std::condition_variable changed;
  size_t reads = 0;
  Told<at::Tensor> dataset{[&](size_t index) {
    const std::lock_guard lock(mutex);
    ++reads;
    changed.notify_all();
    return torch::tensor(static_cast<int64_t>(index));
  }};
  DataLoader loader(dataset, DistributedSampler(64, 0, 1, kUnshuffled),
                    {.batch_size = 2, .num_workers = 2, .prefetch_factor = 3});
  size_t delivered = 0;
  for ([[maybe_unused]] auto& batch : loader) {
    ++delivered;
    const size_t furthest = std::min<size_t>(2 * (delivered + 6), 64);
    std::unique_lock lock(mutex);
    EXPECT_TRUE(changed.wait_for(lock, 30s, [&] { return reads >= furthest; })) << reads << " of " << furthest;
    EXPECT_EQ(reads, furthest);
  }
  EXPECT_EQ(delivered, 32u);
}

TEST(DataLoader, ReadsOnSeveralThreadsAtATime) {
  std::mutex mutex;
  std::condition_variable changed;
  int inside = 0, most = 0;
  Told<at::Tensor> dataset{[&](size_t index) {
    std::unique_lock lock(mutex);
    most = std::max(most, ++inside);
    changed.notify_all();
    changed.wait_for(lock, 30s, [&] { return most == 3; });  // until all workers have been here
    --inside;
    return torch::tensor(static_cast<int64_t>(index));
  }};
  DataLoader loader(dataset, DistributedSampler(9, 0, 1, kUnshuffled), {.batch_size = 1, .num_workers = 3});
  size_t next = 0;
  for (auto& batch : loader) EXPECT_EQ(numbers_in(batch), Indices{next++});
  EXPECT_EQ(most, 3);
}

// Notes which copy of it each thread reads.
struct Copied {
  struct Seen {
    std::mutex mutex;
    std::condition_variable changed;
    std::map<const void*, std::thread::id> readers;
  };
  at::Tensor get(size_t) {
    std::unique_lock lock(seen->mutex);
    EXPECT_EQ(seen->readers.emplace(this, std::this_thread::get_id()).first->second, std::this_thread::get_id());
    seen->changed.notify_all();
    seen->changed.wait_for(lock, 30s, [&] { return seen->readers.size() == 4; });  // until all workers are here
    return torch::tensor(0);
  }
  std::shared_ptr<Seen> seen = std::make_shared<Seen>();
};

TEST(DataLoader, GivesEachWorkerItsOwnCopy) {
  const Copied dataset;
  DataLoader loader(dataset, DistributedSampler(40, 0, 1), {.num_workers = 4});
  for ([[maybe_unused]] auto& batch : loader) {
  }
  EXPECT_EQ(dataset.seen->readers.size(), 4u);
}

TEST(DataLoader, SharesWhatAPointerPointsTo) {
  struct Uncopyable {
    at::Tensor get(size_t index) {
      ++reads;
      return torch::tensor(static_cast<int64_t>(index));
    }
    std::atomic<int> reads = 0;
  };
  auto dataset = std::make_shared<Uncopyable>();
  DataLoader loader(dataset, DistributedSampler(50, 0, 1), {.batch_size = 5, .num_workers = 3});
  for ([[maybe_unused]] auto& batch : loader) {
  }
  EXPECT_EQ(dataset->reads, 50);
}

TEST(DataLoader, ComputesOnTheWorkersThreadWithoutAutograd) {
  const int before = torch::get_num_threads();
  torch::set_num_threads(3);
  const auto weight = torch::ones({1}, torch::requires_grad());
  std::atomic<int> threads = 0;
  Told<at::Tensor> dataset{[&](size_t) {
    threads = at::get_num_threads();
    return weight * 2;
  }};
  DataLoader loader(dataset, DistributedSampler(1, 0, 1), {.num_workers = 1});
  for (auto& batch : loader) EXPECT_FALSE(batch.requires_grad());
  EXPECT_EQ(threads, 1);
  EXPECT_EQ(torch::get_num_threads(), 3);
  torch::set_num_threads(before);
}

TEST(DataLoader, MakesBatchesOfAnySamples) {
  const DistributedSampler sampler(4, 0, 1, kUnshuffled);
  const DataLoaderOptions options{.batch_size = 4, .num_workers = 2};

  DataLoader examples(Told<torch::data::TensorExample>{[](size_t index) { return torch::full({2}, double(index)); }},
                      sampler, options);
  for (auto& batch : examples) EXPECT_EQ(batch.data.sizes(), (std::vector<int64_t>{4, 2}));

  struct Word {
    std::string letters;
  };
  Told<Word> words{[](size_t index) { return Word{std::string(index, 'a')}; }};
  DataLoader as_they_are(words, sampler, options);
  for (std::vector<Word>& batch : as_they_are) EXPECT_EQ(batch.at(3).letters, "aaa");

  const auto lengths = [](std::vector<Word> batch) {
    size_t sum = 0;
    for (const auto& word : batch) sum += word.letters.size();
    return sum;
  };
  DataLoader summed(words, sampler, lengths, options);
  for (size_t& batch : summed) EXPECT_EQ(batch, 6u);

  DataLoader mapped(Numbers(4).map(torch::data::transforms::Stack<>()), sampler, options);
  for (Example<>& batch : mapped) EXPECT_EQ(numbers_in(batch.data), (Indices{0, 1, 2, 3}));
}

TEST(DataLoader, AsksForTheWholeBatchUnlessItIsToMakeIt) {
  struct Gathered {
    at::Tensor get(size_t) { return torch::tensor(-1); }
    at::Tensor gather(torch::ArrayRef<size_t> samples) { return torch::full({2}, double(samples.at(1))); }
  };
  const DistributedSampler sampler(2, 0, 1, kUnshuffled);
  DataLoader by_default(Gathered(), DistributedSampler(2, 0, 1), {});
  EXPECT_EQ(by_default.size(), 2u);
  DataLoader whole(Gathered(), sampler, {.batch_size = 2});
  for (at::Tensor& batch : whole) EXPECT_EQ(numbers_in(batch), (Indices{1, 1}));
  struct GathersAlone {
    at::Tensor gather(torch::ArrayRef<size_t> samples) { return torch::full({3}, double(samples.at(0))); }
  };
  DataLoader alone(GathersAlone(), sampler, {.batch_size = 2});
  for (at::Tensor& batch : alone) EXPECT_EQ(numbers_in(batch), (Indices{0, 0, 0}));
  const auto first = [](std::vector<at::Tensor> samples) { return samples.at(0).item<int>(); };
  DataLoader made(Gathered(), sampler, first, {.batch_size = 2});
  for (int& batch : made) EXPECT_EQ(batch, -1);
}

TEST(Stack, EqualsThatOfLibTorch) {
  const auto numbers = torch::arange(24, torch::kDouble).reshape({4, 6});
  const auto rows = [](const at::Tensor& matrix) { return std::vector{matrix[0], matrix[1]}; };
  for (const auto& matrix :
       {numbers, numbers.t(), numbers.to(torch::kHalf), numbers.to(torch::kComplexDouble), torch::zeros({2, 0}),
        torch::conj(torch::complex(numbers, numbers)), torch::empty({2, 3}, torch::kMeta)}) {
    const auto stacked = Stack()(rows(matrix)), expected = torch::stack(rows(matrix));
    EXPECT_EQ(stacked.options().dtype(), expected.options().dtype());
    EXPECT_EQ(stacked.sizes(), expected.sizes());
    EXPECT_TRUE(matrix.is_meta() || torch::equal(torch::resolve_conj(stacked), torch::resolve_conj(expected)));
  }
  const auto weight = torch::ones({3}, torch::requires_grad());
  Stack()(std::vector{weight, weight}).sum().backward();
  EXPECT_TRUE(torch::equal(weight.grad(), torch::full({3}, 2.0)));
}

TEST(DataLoader, NamesTheSamplesOfABatchThatADatasetCannotRead) {
  struct Torn : torch::data::datasets::BatchDataset<Torn, int> {
    int get_batch(torch::ArrayRef<size_t>) override { throw UsageError("no such page"); }
    torch::optional<size_t> size() const override { return 20; }
  };
  DataLoader loader(Torn(), DistributedSampler(20, 0, 1, kUnshuffled), {.batch_size = 10});
  EXPECT_EQ(error_of<UsageError>([&] { loader.begin(); }),
            "rank 0: DataLoader: epoch 0: samples 0 1 2 3 4 5 6 7 and 2 more: no such page");
}

TEST(DataLoader, DeliversOnADevice) {
  DataLoader loader(Numbers(3), DistributedSampler(3, 0, 1), {.batch_size = 2, .device = torch::Device("meta")});
  for (auto& batch : loader) {
    EXPECT_TRUE(batch.data.is_meta());
    EXPECT_TRUE(batch.target.is_meta());
  }
}

TEST(DataLoader, DeliversPinnedMemoryAndOnAGpu) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "this machine has no GPU";
  DistributedSampler sampler(3, 0, 1, kUnshuffled);
  DataLoader pinned(Numbers(3), sampler, {.batch_size = 3, .pin_memory = true});
  for (auto& batch : pinned) EXPECT_TRUE(batch.data.is_pinned() && batch.target.is_pinned());
  DataLoader placed(Numbers(3), sampler, {.batch_size = 3, .device = torch::Device("cuda")});
  for (auto& batch : placed) {
    EXPECT_TRUE(batch.data.is_cuda());
    EXPECT_EQ(numbers_in(batch.target.cpu()), (Indices{0, 10, 20}));
  }
}

TEST(DataLoader, TellsHowLongTheLoopHasWaited) {
  int left = 4;  // that are slow
  Told<at::Tensor> dataset{[&](size_t) {
    if (left-- > 0) std::this_thread::sleep_for(50ms);
    return torch::tensor(0);
  }};
  DataLoader loader(dataset, DistributedSampler(4, 0, 1, kUnshuffled), {.num_workers = 0});
  for ([[maybe_unused]] auto& batch : loader) {
  }
  const auto slow = loader.waited();
  EXPECT_GE(slow, 200ms);
  for ([[maybe_unused]] auto& batch : loader) {
  }
  EXPECT_GT(loader.waited(), 0ms);
  EXPECT_LT(loader.waited(), slow) << "of the last loop alone";
}

TEST(DataLoader, HasNoWorkersInAForkedChild) {
  Told<at::Tensor> dataset{[](size_t index) { return torch::tensor(static_cast<int64_t>(index)); }};
  using Loader = decltype(DataLoader(dataset, DistributedSampler(100, 0, 1), {}));
  std::optional<Loader> with_workers(std::in_place, dataset, DistributedSampler(100, 0, 1),
                                     DataLoaderOptions{.batch_size = 10, .num_workers = 2});
  std::optional<Loader> without(std::in_place, dataset, DistributedSampler(100, 0, 1),
                                DataLoaderOptions{.batch_size = 10, .num_workers = 0});
  auto count = [](Loader& loader) {
    int batches = 0;
    for ([[maybe_unused]] auto& batch : loader) ++batches;
    return batches;
  };
  auto loop = with_workers->begin();
  const int code = exit_code_of_fork([&] {
    expect_error<UsageError>([&] { ++loop; }, "was forked from the process that made the DataLoader");
    expect_error<UsageError>([&] { with_workers->begin(); }, "was forked from the process that made the DataLoader");
    EXPECT_EQ(count(*without), 10);
    with_workers.reset();
    without.reset();
    ::_exit(testing::Test::HasFailure() ? 1 : 0);  // exit() destroys LibTorch's thread pool, which crashes in a child
  });
  EXPECT_EQ(code, 0);
  EXPECT_EQ(count(*with_workers), 10);
}

TEST(DataLoader, EndsWhileItsWorkersAreBusy) {
  std::atomic<int> reads = 0;
  {
    Told<at::Tensor> dataset{[&](size_t) {
      ++reads;
      return torch::tensor(0);
    }};
    DataLoader loader(dataset, DistributedSampler(100000, 0, 1), {.batch_size = 50, .num_workers = 3});
    loader.begin();
  }
  const int left = reads;
  EXPECT_LE(left, 50 * 7);
}

TEST(DataLoader, RefusesWhatMakesNoSense) {
  const auto refused = [](size_t samples, DataLoaderOptions options, size_t of_sampler = 10) {
    return error_of<UsageError>(
        [&] { DataLoader loader(Numbers(samples), DistributedSampler(of_sampler, 1, 2), options); });
  };
  EXPECT_THAT(refused(10, {.batch_size = 0}), HasSubstr("rank 1: DataLoader: batch_size is 0, expected 1 or more"));
  EXPECT_THAT(refused(10, {.num_workers = -1}), HasSubstr("num_workers is -1, expected 0 or more"));
  EXPECT_THAT(refused(10, {.prefetch_factor = 0}), HasSubstr("prefetch_factor is 0, expected 1 or more"));
  EXPECT_THAT(refused(11, {}),
              HasSubstr("the sampler was created for 10 samples, but the dataset has 11; create the sampler"));
  EXPECT_THAT(refused(10, {.batch_size = 6, .drop_last = true}), HasSubstr("this rank has 5 samples per epoch"));
  EXPECT_EQ(refused(10, {.batch_size = 5, .drop_last = true}), "no such error");
  Told<std::string> words{[](size_t) { return "word"; }};
  EXPECT_THAT(error_of<UsageError>(
                  [&] { DataLoader loader(words, DistributedSampler(2, 0, 1), {.device = torch::Device("cpu")}); }),
              HasSubstr("give it a function tensors()"));
}

/// Nested: a struct in a vector in a struct.
struct Labelled {
  torch::Tensor image, label;
  int count = 0;
  auto tensors() { return std::tie(image, label); }
};
struct Album {
  std::vector<Labelled> pages;
  torch::Tensor cover;
  auto tensors() { return std::tie(pages, cover); }
};

TEST(TensorsIn, AStructListsItsTensors) {
  Album album{{{torch::ones(1), torch::ones(2)}, {torch::ones(3), {}}}, torch::ones(4)};
  std::vector<int64_t> sizes;
  TensorsIn<Album>::visit(album, [&](at::Tensor& tensor) {
    sizes.push_back(tensor.numel());
    tensor = tensor + 1;
  });
  EXPECT_THAT(sizes, testing::ElementsAre(1, 2, 3, 4)) << "undefined tensors are left out";
  EXPECT_EQ(album.pages[1].image[0].item<int>(), 2) << "references, not copies";
  static_assert(TensorsIn<Album>::kAny && !TensorsIn<std::vector<int>>::kAny);
}

TEST(DataLoader, PlacesTheTensorsOfAStruct) {
  Told<Labelled> pages{[](size_t index) { return Labelled{torch::full({2}, double(index)), {}, int(index)}; }};
  const auto first = [](std::vector<Labelled> samples) { return samples.front(); };
  DataLoader loader(pages, DistributedSampler(4, 0, 1, {.shuffle = false}), first,
                    {.batch_size = 2, .device = torch::Device("meta")});
  for (Labelled& batch : loader) EXPECT_TRUE(batch.image.is_meta());
}

// --- data of a rank of its own

TEST_P(DataLoaderWorkers, DeliverAllSamplesWithoutASampler) {
  DataLoader loader(Numbers(7), {.batch_size = 3, .num_workers = GetParam()});
  EXPECT_FALSE(loader.has_sampler());
  EXPECT_EQ(loader.size(), 3);
  for (int epoch : {0, 1}) {
    SCOPED_TRACE(epoch);
    EXPECT_THAT(indices_of_batches(loader), ElementsAre(Indices{0, 1, 2}, Indices{3, 4, 5}, Indices{6}));
  }
  const auto sum = [](const std::vector<Example<>>& samples) { return samples.size(); };
  DataLoader collated(Numbers(7), sum, {.batch_size = 4, .num_workers = GetParam()});
  std::vector<size_t> sizes;
  for (auto& size : collated) sizes.push_back(size);
  EXPECT_THAT(sizes, ElementsAre(4u, 3u));
}

Indices flat(const std::vector<Indices>& batches) {
  Indices all;
  for (const auto& batch : batches) all.insert(all.end(), batch.begin(), batch.end());
  return all;
}

TEST_P(DataLoaderWorkers, ShuffleAnewInEachEpochWithoutASampler) {
  const DataLoaderOptions options{.batch_size = 8, .shuffle = true, .seed = 4, .num_workers = GetParam()};
  const auto order_of = [](int64_t epoch) {
    return distributed_indices(30, 0, 1, {.shuffle = true, .seed = 4}, epoch);
  };
  const LogLines log;
  DataLoader loader(Numbers(30), options);
  for (const int64_t epoch : {0, 1, 2}) EXPECT_EQ(flat(indices_of_batches(loader)), order_of(epoch));
  for (auto batch = loader.begin(); batch != loader.end(); ++batch)
    if (loader.sampler().position() == 16) break;
  EXPECT_EQ(flat(indices_of_batches(loader)), order_of(3)) << "an epoch that was left begins again";
  loader.sampler().set_epoch(9);
  for (int repeat : {0, 1}) EXPECT_EQ(flat(indices_of_batches(loader)), order_of(9)) << repeat;
  EXPECT_THAT(log.lines(), testing::IsEmpty());
}

TEST(DataLoader, ContinuesWithoutASampler) {
  const DataLoaderOptions options{.batch_size = 2, .shuffle = true, .seed = 4};
  DataLoader whole(Numbers(7), options), first(Numbers(7), options), second(Numbers(7), options);
  const auto expected = indices_of_batches(whole);
  auto position = second.sampler();
  auto batch = first.begin();
  ++batch;
  through_archive(first.sampler(), position);
  EXPECT_THAT(indices_of_batches(second), ElementsAre(expected[2], expected[3]));
  EXPECT_EQ(indices_of_batches(second), indices_of_batches(whole)) << "the next epoch";
}

TEST(DataLoader, RefusesWhatMakesNoSenseWithoutASampler) {
  const auto refused = [](auto dataset, const DataLoaderOptions& options) {
    return error_of<UsageError>([&] { DataLoader loader(dataset, options); });
  };
  EXPECT_THAT(refused(Numbers(0), {}), HasSubstr("0 samples"));
  EXPECT_THAT(refused(Numbers(3), {.batch_size = -2}), HasSubstr("batch_size is -2, expected 1 or more"));
  EXPECT_THAT(refused(Numbers(3), {.batch_size = 4, .drop_last = true}), HasSubstr("this rank has 3 samples"));
  EXPECT_THAT(
      error_of<UsageError>([] { DataLoader loader(Numbers(3), DistributedSampler(3, 1, 2), {.shuffle = true}); }),
      AllOf(HasSubstr("rank 1: DataLoader: shuffle is 1"), HasSubstr("DistributedSamplerOptions")));
}

TEST(DataLoader, NamesTheRankOfTheProcessWithoutASampler) {
  setenv("RANK", "2", 1);
  setenv("WORLD_SIZE", "4", 1);
  Told<at::Tensor> read{[](size_t) -> at::Tensor { throw std::runtime_error("a page is torn"); }};
  struct Sized : Told<at::Tensor> {
    torch::optional<size_t> size() const { return 5; }
  };
  DataLoader loader(Sized{read}, {});
  unsetenv("RANK");
  unsetenv("WORLD_SIZE");
  EXPECT_THAT(error_of<Error>([&] { loader.begin(); }),
              testing::StartsWith("rank 2: DataLoader: epoch 0: sample 0: a page is torn"));
}

TEST(DataLoader, RefusesTwoLoopsAtATime) {
  DistributedSampler sampler(8, 0, 1);
  DataLoader loader(Numbers(8), sampler, {.batch_size = 2});
  auto first = loader.begin();
  auto second = loader.begin();
  EXPECT_THAT(error_of<UsageError>([&] { ++first; }), HasSubstr("another loop over this loader has started"));
  ++second;
  EXPECT_EQ(sampler.position(), 4u);
  sampler.next(1);
  EXPECT_THAT(error_of<UsageError>([&] { ++second; }), HasSubstr("one sampler for each loader"));
}

}  // namespace
}  // namespace lockstep
