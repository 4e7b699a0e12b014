// Copies of batches to a GPU that run ahead of the loop.

#include <condition_variable>
#include <mutex>
#include <stdexcept>

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/data_loader.h>
#include <lockstep/error.h>
#include <lockstep/run_threads.h>
#include <lockstep/stream_loader.h>

#include "data/batch_queue.h"
#include "support/messages.h"

namespace lockstep {
namespace {

using detail::BatchQueue;
using detail::DeviceCopies;

/// Counts, and blocks until a count is reached.
class Counter {
 public:
  void add() {
    const std::lock_guard lock(mutex_);
    ++count_;
    changed_.notify_all();
  }
  void await(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return count_ >= count; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
};

/// Notes the numbers of the batches that a queue announced.
class Announced {
 public:
  void operator()(void* batch) {
    const std::lock_guard lock(mutex_);
    numbers_.push_back(*static_cast<size_t*>(batch));
  }
  std::vector<size_t> numbers() const {
    const std::lock_guard lock(mutex_);
    return numbers_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<size_t> numbers_;
};

size_t number_of(const BatchQueue::Batch& batch) {
  return *std::static_pointer_cast<size_t>(batch);
}

TEST(BatchQueue, AnnouncesABatchWhenItIsTheNextToTake) {
  Counter asked;
  Announced announced;
  BatchQueue queue("test", 1, 3, [&](void* batch) { announced(batch); });
  queue.start(6, [&](int, size_t number) {
    asked.add();
    return std::make_shared<size_t>(number);
  });
  asked.await(3);  // so batches 0 and 1 are made
  EXPECT_EQ(announced.numbers(), (std::vector<size_t>{0})) << "no more than one batch ahead";
  for (size_t number = 0; number < 4; ++number) {
    asked.await(static_cast<int>(number) + 3);  // so the next batch is made
    EXPECT_EQ(number_of(queue.next()), number);
    EXPECT_EQ(announced.numbers().size(), number + 2);
  }
  for (size_t number = 4; number < 6; ++number) EXPECT_EQ(number_of(queue.next()), number);
  EXPECT_EQ(announced.numbers(), (std::vector<size_t>{0, 1, 2, 3, 4, 5}));
}

TEST(BatchQueue, AWorkerAnnouncesTheBatchForWhichTheLoopWaits) {
  Announced announced;
  BatchQueue queue("test", 1, 1, [&](void* batch) { announced(batch); });  // makes a batch when the last was taken
  queue.start(4, [&](int, size_t number) { return std::make_shared<size_t>(number); });
  for (size_t number = 0; number < 4; ++number) {
    EXPECT_EQ(number_of(queue.next()), number);
    EXPECT_GE(announced.numbers().size(), number + 1);
  }
  EXPECT_EQ(announced.numbers(), (std::vector<size_t>{0, 1, 2, 3}));
}

TEST(BatchQueue, ThrowsWhatTheAnnouncementThrewInPlaceOfItsBatch) {
  for (size_t ahead : {1u, 3u}) {
    BatchQueue queue("test", 1, ahead, [](void* batch) {
      if (*static_cast<size_t*>(batch) == 2) throw std::runtime_error("out of memory");
    });
    queue.start(4, [](int, size_t number) { return std::make_shared<size_t>(number); });
    EXPECT_EQ(number_of(queue.next()), 0u);
    EXPECT_EQ(number_of(queue.next()), 1u);
    expect_error<std::runtime_error>([&] { queue.next(); }, "out of memory");
    EXPECT_EQ(queue.next(), nullptr);
  }
}

TEST(BatchQueue, AnnouncesNothingWithoutWorkers) {
  BatchQueue queue("test", 0, 0, [](void*) { ADD_FAILURE(); });
  queue.start(2, [](int, size_t number) { return std::make_shared<size_t>(number); });
  for (size_t number = 0; number < 2; ++number) EXPECT_EQ(number_of(queue.next()), number);
}

/// Samples of 16 MB, all values of which are their number.
struct LargeNumbers {
  static constexpr int64_t kValues = 4 << 20;

  at::Tensor get(size_t index) const { return at::full({kValues}, static_cast<int64_t>(index), at::kFloat); }
  torch::optional<size_t> size() const { return 40; }
};

TEST(DataLoader, RefusesAGpuThatIsNotThere) {
  if (torch::cuda::is_available()) GTEST_SKIP() << "this machine has a GPU";
  const DataLoaderOptions options{.device = torch::Device("cuda")};
  expect_error<UsageError>([&] { DataLoader(LargeNumbers(), DistributedSampler(40, 0, 1), options); }, "rank 0",
                           "device is cuda", "sees no GPU");
}

class CudaCopies : public testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "this machine has no GPU";
    factor_ = torch::eye(8192, gpu());
    keep_busy(1);  // LibTorch's first multiplication initializes cuBLAS
    torch::cuda::synchronize();
  }

  static torch::Device gpu() { return {torch::kCUDA, 0}; }
  static c10::Stream current_stream() { return c10::impl::VirtualGuardImpl(torch::kCUDA).getStream(gpu()); }

  /// Queues work on the current stream, which takes longer than any copy of these tests.
  void keep_busy(int products) {
    for (int i = 0; i < products; ++i) factor_ = factor_.matmul(factor_);
  }

  /// Reads each batch on the GPU long after the loop has released it.
  template <class Loader>
  std::vector<double> sums_of(Loader& loader) {
    std::vector<at::Tensor> sums;
    for (auto& batch : loader) {
      sums.push_back(batch.min() + batch.max());  // at once: its copy must be complete
      keep_busy(2);
      sums.push_back(batch.min() + batch.max());
    }
    std::vector<double> on_host;
    for (const auto& sum : sums) on_host.push_back(sum.item<double>());
    return on_host;
  }

  at::Tensor factor_;
};

TEST_F(CudaCopies, RunWhileTheCurrentStreamIsBusy) {
  const DeviceCopies copies(torch::Device("cuda"));
  auto first = at::zeros({1 << 20}, at::kLong).pin_memory();
  copies.finish({&first}, copies.start({&first}));  // LibTorch's first use of a stream makes streams, which may block
  torch::cuda::synchronize();
  auto batch = at::arange(1 << 20).pin_memory();
  keep_busy(100);
  c10::Event done(torch::kCUDA);
  done.record(current_stream());
  const auto started = copies.start({&batch});
  EXPECT_EQ(batch.device(), gpu());
  {
    const c10::StreamGuard other(c10::impl::VirtualGuardImpl(torch::kCUDA).getStreamFromGlobalPool(gpu()));
    copies.finish({&batch}, started);
    EXPECT_TRUE(torch::equal(batch.cpu(), at::arange(1 << 20)));
  }
  EXPECT_FALSE(done.query()) << "the copy has waited for the current stream";
  torch::cuda::synchronize();
}

TEST_F(CudaCopies, AreWholeAndStayWholeUntilTheyWereRead) {
  DistributedSampler sampler(LargeNumbers().size().value(), 0, 1, {.shuffle = false});
  std::vector<double> expected;
  for (int i = 0; i < 40; ++i) expected.insert(expected.end(), 2, 2 * i);
  for (int workers : {0, 1, 3}) {
    DataLoader loader(LargeNumbers(), sampler, {.num_workers = workers, .device = torch::Device("cuda")});
    EXPECT_EQ(sums_of(loader), expected) << workers << " workers";
  }
}

struct LargeStream {
  std::optional<at::Tensor> next() {
    if (index == 40) return std::nullopt;
    return LargeNumbers().get(index++);
  }
  size_t index = 0;
};

TEST_F(CudaCopies, OfAStreamAreWholeToo) {
  run_threads(1, [&](ProcessGroup world) {
    StreamLoader loader([](const StreamPart&) { return LargeStream(); }, world,
                        {.num_workers = 2, .device = torch::Device("cuda")});
    const auto sums = sums_of(loader);
    ASSERT_EQ(sums.size(), 160u) << "two parts";
    for (size_t i = 0; i < sums.size(); ++i) EXPECT_EQ(sums[i], 2 * (i / 4)) << i;
  });
}

}  // namespace
}  // namespace lockstep
