// Calls of ranks that access one another's memory.

#include "comm/shared_memory_calls.h"

#include <cstdlib>
#include <mutex>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <lockstep/error.h>
#include <lockstep/run_threads.h>

#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

using detail::allocate_shared;
using detail::reduce_ranges_async;
using detail::shares_memory;

const CallOptions kHere{.site = {"the test", 0}};
const std::vector<std::string> kBackendsThatShare{"threads", "shm"};

TEST(SharedMemoryCalls, AreOfBackendsThatShareMemory) {
  for (const auto& backend : backends_under_test())
    run_threads(2,
                [&](const ProcessGroup& world) {
                  const bool shares = backend == "threads" || backend == "shm";
                  EXPECT_EQ(shares_memory(world), shares) << backend;
                  if (!shares)
                    expect_error<UsageError>([&] { allocate_shared(world, 8, at::kFloat, kHere); },
                                             "do not share memory; use 'shm' or 'threads'");
                },
                {.backend = backend});
}

TEST(SharedMemoryCalls, AllocateMemoryThatOutlivesTheGroup) {
  for (const auto& backend : kBackendsThatShare) {
    std::vector<at::Tensor> memories(3);
    run_threads(3,
                [&](const ProcessGroup& world) {
                  auto memory = allocate_shared(world, 100'000, at::kDouble, kHere);
                  EXPECT_EQ(memory.scalar_type(), at::kDouble);
                  EXPECT_EQ(memory.abs().sum().item<double>(), 0);
                  world.barrier();
                  memory[1000 * world.rank()].fill_(world.rank() + 1);
                  world.barrier();
                  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(memory[1000 * rank].item<double>(), rank + 1);
                  memories[static_cast<size_t>(world.rank())] = memory;
                },
                {.backend = backend});
    memories[0].reset();
    memories[1][5].fill_(7);
    EXPECT_EQ(memories[2][5].item<double>(), 7) << backend;
  }
}

TEST(SharedMemoryCalls, FreeMemoryThatAllRanksHaveReleased) {
  ::setenv("LOCKSTEP_SHM_BYTES", "268435456", 1);
  run_threads(2,
              [&](const ProcessGroup& world) {
                for (int i = 0; i < 20; ++i) {
                  const auto memory = allocate_shared(world, 8 << 20, at::kFloat, kHere);  // 32 MiB
                  EXPECT_EQ(memory[i].item<float>(), 0) << "zeros, also in memory that was used before";
                  world.barrier();
                  if (world.rank() == i % 2) memory.fill_(1);
                }
                expect_error<SystemError>([&] { allocate_shared(world, 128 << 20, at::kFloat, kHere); },
                                          "no room for 134217728 elements of Float", "raise LOCKSTEP_SHM_BYTES");
                world.barrier();  // the group still works
              },
              {.backend = "shm"});
  ::unsetenv("LOCKSTEP_SHM_BYTES");
}

TEST(SharedMemoryCalls, ReduceTheRangesOfEachRank) {
  constexpr int64_t kElements = 50'003;
  for (const auto& backend : kBackendsThatShare)
    for (int ranks : {1, 2, 3})
      for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16})
        run_threads(ranks,
                    [&](const ProcessGroup& world) {
                      const auto all = at::arange(kElements * ranks, at::kFloat).remainder(1013).sub(500).div(64);
                      const auto parts = all.view({ranks, kElements}).to(dtype);
                      auto expected = parts[world.rank()].clone();
                      auto tensor = world.allocate({kElements}, dtype);
                      tensor.copy_(parts[world.rank()]);
                      world.all_reduce(expected, ReduceOp::kAvg);

                      const int64_t mine = world.rank();
                      const std::vector<Backend::Range> ranges{{3 + mine, 5}, {100, 0}, {1000 * (mine + 1), 40'001}};
                      auto sums = at::zeros({3, kElements}, dtype);
                      std::mutex mutex;
                      int64_t parts_seen = 0;
                      const auto consume = [&](size_t range, int64_t begin, int64_t count, const void* values) {
                        const std::lock_guard lock(mutex);
                        ++parts_seen;
                        EXPECT_EQ(begin % 1024, 0);
                        sums[static_cast<int64_t>(range)]
                            .narrow(0, begin, count)
                            .add_(at::from_blob(const_cast<void*>(values), {count}, dtype));
                      };
                      detail::reduce_ranges(world, {tensor, ReduceOp::kAvg, ranges, consume}, kHere);
                      EXPECT_GT(parts_seen, 4);
                      for (size_t i = 0; i < ranges.size(); ++i) {
                        const auto [begin, size] = ranges[i];
                        EXPECT_TRUE(at::equal(sums[static_cast<int64_t>(i)].narrow(0, 0, size),
                                              expected.narrow(0, begin, size)))
                            << backend << ' ' << ranks << ' ' << dtype << ' ' << i;
                      }
                      EXPECT_TRUE(at::equal(tensor, parts[world.rank()])) << "the tensor stays";
                    },
                    {.backend = backend});
}

TEST(SharedMemoryCalls, RefuseTensorsElsewhere) {
  run_threads(2,
              [&](const ProcessGroup& world) {
                const auto ignore = [](size_t, int64_t, int64_t, const void*) {};
                expect_error<Error>(  // of this rank, or of the other, whose call then fails first
                    [&] {
                      reduce_ranges_async(world, {at::ones({20'000}), ReduceOp::kSum, {{0, 5}}, ignore}, kHere).wait();
                    },
                    "is not in shared memory; use ProcessGroup::allocate");
              },
              {.backend = "shm"});
}

TEST(SharedMemoryCalls, OfDifferentSizesAreAMismatch) {
  for (const auto& backend : kBackendsThatShare)
    run_threads(2,
                [&](const ProcessGroup& world) {
                  const auto ignore = [](size_t, int64_t, int64_t, const void*) {};
                  auto tensor = world.allocate({20'000 + world.rank()}, at::kFloat).zero_();
                  expect_error<MismatchError>(
                      [&] {
                        reduce_ranges_async(world, {tensor, ReduceOp::kSum, {}, ignore}, kHere).wait();
                      },
                      "reduce_ranges(sum, Float[20000])", "reduce_ranges(sum, Float[20001])");
                },
                {.backend = backend});
}

}  // namespace
}  // namespace lockstep
