#include <lockstep/process_group.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <future>
#include <optional>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include <lockstep/error.h>
#include <lockstep/run_threads.h>
#include <lockstep/spawn.h>
#include <lockstep/version.h>

#include "support/forked.h"
#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

using testing::HasSubstr;

ProcessGroup alone(const std::string& backend = "auto") {
  return init_process_group({.backend = backend, .rank = 0, .world_size = 1, .device = c10::Device(c10::kCPU)});
}

TEST(ProcessGroup, OneRankAloneNeedsNobody) {
  for (const std::string backend : {"auto", "threads"}) {
    auto world = alone(backend);
    EXPECT_EQ(world.rank(), 0);
    EXPECT_EQ(world.size(), 1);
    EXPECT_EQ(world.local_rank(), 0);
    EXPECT_EQ(world.device(), c10::Device("cpu"));
    auto tensor = at::arange(5, at::kFloat);
    world.all_reduce(tensor, ReduceOp::kAvg);
    EXPECT_TRUE(at::equal(tensor, at::arange(5, at::kFloat)));
  }
}

TEST(ProcessGroup, CopiesAreTheSameGroup) {
  auto world = alone();
  auto copy = world;
  EXPECT_EQ(copy, world);
  EXPECT_NE(alone(), world);
}

TEST(ProcessGroup, MoreRanksThanAJobCanHaveAreRefusedAtOnce) {
  for (int ranks : {65537, 1'000'000, std::numeric_limits<int>::max()})
    expect_error<UsageError>([&] { init_process_group({.rank = 0, .world_size = ranks}); }, "world_size is",
                             "at most 65536", "WORLD_SIZE");
}

TEST(ProcessGroup, TheHeartbeatLimitIsAlsoAVariable) {
  for (const char* wrong : {"0.1", "nan", "x", "-3", "1e9", ""}) {
    ::setenv("LOCKSTEP_HEARTBEAT_LIMIT", wrong, 1);
    expect_error<UsageError>([] { alone(); }, "LOCKSTEP_HEARTBEAT_LIMIT", "from 0.5 to 1000000");
  }
  ::setenv("LOCKSTEP_HEARTBEAT_LIMIT", "2.5", 1);
  EXPECT_NO_THROW(alone());
  ::unsetenv("LOCKSTEP_HEARTBEAT_LIMIT");
}

TEST(ProcessGroup, NumbersAreReducedCopiedAndGathered) {
  for (const auto& backend : backends_under_test())
    run_threads(3,
                [](ProcessGroup world) {
                  const int rank = world.rank();
                  const double half = world.all_reduce(rank + 0.5);
                  EXPECT_EQ(half, 4.5);
                  EXPECT_EQ(world.all_reduce(float(rank), ReduceOp::kAvg), 1.f);
                  EXPECT_EQ(world.all_reduce((int64_t{1} << 60) + rank, ReduceOp::kMax), (int64_t{1} << 60) + 2);
                  static_assert(std::is_same_v<decltype(world.all_reduce(size_t{1})), size_t>);
                  EXPECT_EQ(world.all_reduce(size_t{1}), 3u);
                  EXPECT_EQ(world.broadcast(10 * rank, 2), 20);
                  EXPECT_EQ(world.broadcast(rank + 0.25, 1), 1.25);
                  EXPECT_EQ(world.all_gather(rank * rank), (std::vector<int>{0, 1, 4}));
                  EXPECT_EQ(world.all_gather(rank / 2.0), (std::vector<double>{0, 0.5, 1}));
                  expect_error<UsageError>([&] { (void)world.all_reduce(1, ReduceOp::kAvg); }, "all_reduce", "Long");
                },
                {.backend = backend});
}

TEST(ProcessGroup, BadArgumentsAreNamedAndTheGroupGoesOn) {
  run_threads(2, [](ProcessGroup world) {
    auto good = at::ones({4});
    auto me = "rank " + std::to_string(world.rank());
    expect_error<UsageError>([&] { world.all_reduce(at::Tensor()); }, me, "all_reduce", "undefined");
    expect_error<UsageError>([&] { world.all_reduce(at::empty({2}, at::device(at::kMeta))); }, "meta", "cpu",
                             "world.device()");
    expect_error<UsageError>([&] { world.all_reduce(at::ones({2}, at::kComplexFloat)); }, "ComplexFloat",
                             "view_as_real");
    expect_error<UsageError>([&] { world.all_reduce(at::ones({2}).to_sparse()); }, "Sparse", "dense");
    expect_error<UsageError>([&] { world.all_reduce(at::ones({1}).expand({4})); }, "share memory", "contiguous()");
    expect_error<UsageError>([&] { world.all_reduce(at::ones({2}, at::kInt), ReduceOp::kAvg); }, "avg", "Int",
                             "use sum");
    expect_error<UsageError>([&] { world.all_reduce(good, ReduceOp::kXor); }, "xor", "Float", "integer");
    expect_error<UsageError>([&] { world.broadcast(good, 2); }, "src is rank 2", "0 to 1");
    expect_error<UsageError>([&] { world.reduce(good, -1); }, "dst is rank -1");
    expect_error<UsageError>([&] { world.all_gather(at::ones({7}), good); }, "7", "4", "8");
    expect_error<UsageError>([&] { world.all_gather(at::ones({8}, at::kInt), good); }, "Int", "Float");
    expect_error<UsageError>([&] { world.reduce_scatter(good, at::ones({9})); }, "9", "8");
    expect_error<UsageError>([&] { world.all_to_all({good}, {good, good}); }, "1 tensors", "give 2");
    expect_error<UsageError>([&] { world.send(good, world.rank()); }, "itself");
    expect_error<UsageError>([&] { world.recv(good, 5); }, "src is rank 5");
    int other = 1 - world.rank();
    expect_error<UsageError>([&] { world.gather({good, good}, good, other); }, "only rank " + std::to_string(other));
    expect_error<UsageError>([&] { world.scatter(good, {good}, world.rank()); }, "1 tensors", "give 2");
    expect_error<UsageError>([&] { auto work = world.all_reduce_async(at::Tensor()); }, "undefined");
    auto pair = at::ones({2, 4});
    expect_error<UsageError>([&] { world.all_gather(pair, pair[other]); }, "share memory");
    expect_error<UsageError>([&] { world.reduce_scatter(pair[other], pair); }, "share memory");
    expect_error<UsageError>([&] { world.all_to_all({pair[0], pair[1]}, {pair[0], pair[1]}); }, "share memory");
    expect_error<UsageError>([&] { world.all_gather({pair[0], pair[1]}, pair[other]); }, "share memory");

    world.all_reduce(good);
    EXPECT_TRUE(at::equal(good, at::full({4}, 2.0f)));
  });
}

TEST(ProcessGroup, TensorsThatRequireGradAreChangedInPlace) {
  run_threads(2, [](ProcessGroup world) {
    auto parameter = at::full({2, 3}, world.rank() + 1.0).requires_grad_();
    world.all_reduce(parameter);
    world.all_reduce(parameter.t(), ReduceOp::kAvg);
    EXPECT_TRUE(at::equal(parameter.detach(), at::full({2, 3}, 3.0)));
    EXPECT_TRUE(parameter.is_leaf());
  });
}

TEST(ProcessGroup, UnknownBackendsAreRefusedWithThoseThereAre) {
  expect_error<UsageError>([] { alone("smoke"); }, "'smoke'", "threads", "auto");
#ifndef LOCKSTEP_HAVE_NCCL
  expect_error<UsageError>([] { alone("nccl"); }, "'nccl'", "lockstep doctor");
#endif
}

TEST(ProcessGroup, SenselessOptionsAreRefused) {
  expect_error<UsageError>([] { init_process_group({.rank = 3, .world_size = 2}); }, "rank 3 of 2");
  expect_error<UsageError>([] { init_process_group({.rank = 0}); }, "rank is given without world_size");
  expect_error<UsageError>(
      [] { init_process_group({.backend = "threads", .init_method = "udp://x:1", .rank = 0, .world_size = 2}); },
      "udp://x:1", "file:///path");
  expect_error<UsageError>([] { init_process_group({.rank = 0, .world_size = 1, .device = c10::Device("cuda:64")}); },
                           "cuda:64");
}

TEST(ProcessGroup, TimeOutsAreCheckedAndMayBeForever) {
  using std::chrono::milliseconds;
  expect_error<UsageError>([] { init_process_group({.rank = 0, .world_size = 1, .timeout = milliseconds(0)}); },
                           "0 ms");
  auto world = init_process_group({.rank = 0, .world_size = 1, .timeout = milliseconds::max()});
  world.all_reduce(at::ones({1}));
  EXPECT_GT(world.timeout(), std::chrono::hours(1000));
}

TEST(ProcessGroup, ARankAsThreadThatReturnsHasLeft) {
  for (const auto& backend : backends_under_test()) {
    auto begin = std::chrono::steady_clock::now();
    expect_error<PeerError>(
        [&] {
          run_threads(2,
                      [](ProcessGroup world) {
                        if (world.rank() == 0) world.barrier();
                      },
                      {.backend = backend});
        },
        "rank 0: barrier", "rank 1 (pid ", "has left group 'world' after 0 calls");
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5)) << backend;
  }
}

TEST(ProcessGroup, AMonitoredBarrierIsWokenWhenTheGroupBreaks) {
  for (const auto& backend : backends_under_test()) {
    std::promise<void> told;
    run_threads(2,
                [&](ProcessGroup world) {
                  if (world.rank() == 1) {
                    world.abort("enough");
                    return told.get_future().wait();
                  }
                  expect_error<PeerError>([&] { world.monitored_barrier(); }, "rank 1 gave up: enough");
                  told.set_value();
                },
                {.backend = backend});
  }
}

TEST(ProcessGroup, TimeOutsOfGroupsAndCallsMayBeForever) {
  static constexpr auto kForever = std::chrono::milliseconds::max();
  for (const auto& backend : backends_under_test()) {
    run_threads(2,
                [](ProcessGroup world) {
                  auto group = world.new_group({0, 1}, {.timeout = kForever});
                  auto tensor = at::ones({2});
                  group.all_reduce(tensor, ReduceOp::kSum, {.timeout = kForever});
                  group.monitored_barrier({.timeout = kForever});
                  EXPECT_EQ(tensor[0].item<float>(), 2);
                  expect_error<UsageError>([&] { group.barrier({.timeout = std::chrono::milliseconds(0)}); }, "0 ms");
                },
                {.backend = backend});
  }
}

TEST(ProcessGroup, AHeartbeatLimitTooShortToKeepIsRefused) {
  expect_error<UsageError>(
      [] { init_process_group({.rank = 0, .world_size = 1, .heartbeat_limit = std::chrono::milliseconds(5)}); },
      "heartbeat_limit is 5 ms", "500 ms");
}

// Rank 2 stays away until the others have given it up.
TEST(ProcessGroup, ALateRankIsNamedByTheTimeOut) {
  for (const auto& backend : backends_under_test()) {
    std::atomic<int> gave_up{0};
    std::promise<void> all_gave_up;
    auto run = [&](ProcessGroup world) {
      if (world.rank() == 2) return all_gave_up.get_future().wait();
      try {
        world.all_reduce(at::ones({4}), ReduceOp::kSum, {.timeout = std::chrono::milliseconds(300)});
        ADD_FAILURE() << "all_reduce returned without rank 2";
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("all_reduce")) << backend;
        if (++gave_up == 2) all_gave_up.set_value();
        throw;
      }
    };
    // The rank that times out first is the one whose error comes out; it may take the other along.
    expect_error<TimeoutError>([&] { run_threads(3, run, {.backend = backend}); }, "all_reduce",
                               "did not finish within 300 ms", "Late: rank 2", "outside of any call",
                               "Flight recorder");
  }
}

TEST(ProcessGroup, ABrokenGroupStaysBrokenAndSaysWhy) {
  auto world = alone();
  world.abort("the disk is full");
  for (int attempt = 0; attempt < 2; ++attempt) {
    expect_error<PeerError>([&] { world.all_reduce(at::ones({1})); }, "all_reduce", "the disk is full");
    expect_error<PeerError>([&] { world.barrier(); }, "barrier", "the disk is full");
  }
}

TEST(ProcessGroup, DroppedWorkIsStillDone) {
  run_threads(2, [](ProcessGroup world) {
    auto tensor = at::ones({1000});
    { auto dropped = world.all_reduce_async(tensor); }
    world.barrier();
    EXPECT_TRUE(at::equal(tensor, at::full({1000}, 2.0f)));
  });
}

TEST(ProcessGroup, AnAsynchronousCallOutlivesTheCallersArguments) {
  run_threads(2, [](ProcessGroup world) {
    auto mine = at::full({1000}, world.rank() + 1.0f);
    auto all = at::zeros({2, 1000});
    std::vector<Work> works;
    {
      std::vector<at::Tensor> outputs{all[0], all[1]};
      at::Tensor input = mine.clone();
      works.push_back(world.all_gather_async(outputs, input));
      at::Tensor tensor = mine.view({10, 100});
      works.push_back(world.all_reduce_async(tensor));
      outputs.clear();
      input = tensor = at::Tensor();
    }
    for (auto& work : works) work.wait();
    EXPECT_TRUE(at::equal(mine, at::full({1000}, 3.0f)));
    EXPECT_TRUE(at::equal(all.sum(1), at::tensor({1000.0f, 2000.0f})));
  });
}

// What the callbacks below have seen; a callback of LibTorch may hold nothing itself.
std::vector<std::string> seen_by_the_profiler;

TEST(ProcessGroup, ACallIsARangeInAProfile) {
  auto world = alone();
  auto tensor = at::ones({4});
  auto begin = [](const at::RecordFunction& range) -> std::unique_ptr<at::ObserverContext> {
    seen_by_the_profiler.push_back(std::string("begin ") + range.name());
    return nullptr;
  };
  auto end = [](const at::RecordFunction& range, at::ObserverContext*) {
    seen_by_the_profiler.push_back(std::string("end ") + range.name());
  };
  seen_by_the_profiler.clear();
  auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(begin, end).scopes({at::RecordScope::FUNCTION}));
  world.all_reduce(tensor);
  at::removeCallback(handle);
  world.barrier();
  EXPECT_EQ(seen_by_the_profiler, (std::vector<std::string>{"begin lockstep::all_reduce", "end lockstep::all_reduce"}));
}

#ifdef LOCKSTEP_HAVE_GLOO
// Gloo cannot take a message back, so the group ends with a reason and not with a connection that is stuck.
TEST(ProcessGroup, AMessageDroppedBeforeItIsDoneBreaksAGlooGroup) {
  auto run = [](ProcessGroup world) {
    if (world.rank() == 0) {
      { auto dropped = world.recv_async(at::zeros({4}), 1); }
    }
    world.barrier();
  };
  EXPECT_THROW(run_threads(2, run, {.backend = "gloo"}), PeerError);
  std::promise<void> told;
  run_threads(2,
              [&](ProcessGroup world) {
                if (world.rank() == 1) return told.get_future().wait();
                { auto dropped = world.recv_async(at::zeros({4}), 1); }
                expect_error<PeerError>([&] { world.barrier(); }, "rank 0: barrier", "with rank 1 was destroyed",
                                        "call wait()");
                told.set_value();
              },
              {.backend = "gloo"});
}

TEST(ProcessGroup, AMessageMayOutliveItsGroup) {
  for (const auto& backend : backends_under_test()) {
    run_threads(2,
                [](ProcessGroup world) {
                  auto pending = world.recv_async(at::zeros({4}), 1 - world.rank());
                  world.destroy();
                  expect_error<UsageError>([&] { pending.wait(); }, "destroyed");
                },
                {.backend = backend});
  }
}

// A write to a peer that is gone must be an error here and not the end of the process.
TEST(ProcessGroup, JoiningOverGlooIgnoresBrokenPipesUnlessTheProgramHandlesThem) {
  auto handler_after_joining = [](void (*before)(int)) {
    ::signal(SIGPIPE, before);
    run_threads(2, [](ProcessGroup world) { world.barrier(); }, {.backend = "gloo"});
    return ::signal(SIGPIPE, SIG_IGN);
  };
  EXPECT_EQ(handler_after_joining(SIG_DFL), SIG_IGN);
  void (*own)(int) = [](int) {};
  EXPECT_EQ(handler_after_joining(own), own);
}
#endif

// Ranks as threads: the child has the thread that forked, and none of the others.
TEST(ProcessGroup, AForkedChildIsRefusedAndItsParentGoesOn) {
  for (const auto& backend : backends_under_test())
    run_threads(2,
                [](ProcessGroup world) {
                  auto tensor = at::full({10}, world.rank() + 1.0);
                  std::optional<Work> work = world.all_reduce_async(tensor);
                  work->wait();
                  if (world.rank() == 1) {
                    std::optional<ProcessGroup> kept = world;
                    const int code = exit_code_of_fork([&] {
                      expect_error<UsageError>([&] { world.all_reduce(tensor); }, "was forked from rank 1's process");
                      expect_error<UsageError>([&] { work->wait(); }, "was forked from rank 1's process");
                      expect_error<UsageError>([&] { world.destroy(); }, "was forked from rank 1's process");
                      EXPECT_EQ(world.rank(), 1);
                      work.reset();
                      kept.reset();
                      ::_exit(testing::Test::HasFailure() ? 1 : 0);  // exit() destroys LibTorch's thread pool
                    });
                    EXPECT_EQ(code, 0);
                  }
                  world.all_reduce(tensor);
                  EXPECT_TRUE(at::equal(tensor, at::full({10}, 6.0)));
                },
                {.backend = backend});
}

TEST(ProcessGroup, WorkOutlivesTheGroup) {
  auto tensor = at::ones({1});
  auto work = std::make_unique<Work>(alone().all_reduce_async(tensor));
  try {
    work->wait();  // done before the group went, or given up with it: either way no hang and no crash
  } catch (const PeerError& error) {
    EXPECT_THAT(error.what(), HasSubstr("destroyed"));
  }
  EXPECT_TRUE(work->is_done());
}

TEST(RunThreads, RethrowsTheFirstFailureWithItsRank) {
  for (const auto& backend : backends_under_test()) {
    expect_error<UsageError>(
        [&] {
          run_threads(3,
                      [](ProcessGroup world) {
                        if (world.rank() == 1) throw UsageError("no such file");
                        world.barrier();  // would wait forever
                      },
                      {.backend = backend});
        },
        "rank 1", "no such file");
  }
}

TEST(RunThreads, WakesTheOthersWithPeerError) {
  for (const auto& backend : backends_under_test()) {
    std::atomic<int> woken{0};
    EXPECT_THROW(run_threads(3,
                             [&](ProcessGroup world) {
                               if (world.rank() == 2) throw std::runtime_error("boom");
                               try {
                                 world.all_reduce(at::ones({100000}));
                               } catch (const PeerError& error) {
                                 if (std::string(error.what()).find("rank 2") != std::string::npos) ++woken;
                                 throw;
                               }
                             },
                             {.backend = backend}),
                 Error);
    EXPECT_EQ(woken, 2) << backend;
  }
}

TEST(RunThreads, KeepsForeignExceptionsNested) {
  try {
    run_threads(2, [](ProcessGroup world) {
      if (world.rank() == 0) throw std::out_of_range("beyond the end");
      world.barrier();
    });
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "rank 0: beyond the end");
    EXPECT_THROW(std::rethrow_if_nested(error), std::out_of_range);
  }
}

TEST(RunThreads, RefusesSenselessSizes) {
  expect_error<UsageError>([] { run_threads(0, [](ProcessGroup) {}); }, "run_threads: world_size is 0");
  expect_error<UsageError>([] { spawn(0, [](ProcessGroup) {}); }, "spawn: world_size is 0");
}

}  // namespace
}  // namespace lockstep
