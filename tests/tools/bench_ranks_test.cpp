#include <atomic>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/backend.h>
#include <lockstep/run_threads.h>

#include "bench/ranks/collective_sides.h"
#include "bench/ranks/measure.h"
#include "bench/ranks/pattern.h"
#include "bench/ranks/pinning.h"
#include "page_file.h"

namespace lockstep::bench {
namespace {

using testing::ElementsAre;

constexpr ReduceOp kAllOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct, ReduceOp::kMin,
                                ReduceOp::kMax, ReduceOp::kAnd, ReduceOp::kOr,      ReduceOp::kXor};

TEST(BenchPattern, FindsEachElementThatIsChanged) {
  for (const auto& name : dtype_names()) {
    const auto dtype = dtype_named(name);
    const auto table = reduced_table(3, dtype, ReduceOp::kSum);
    const auto tensor = at::empty({3 * kPeriod + 5}, dtype);
    write_pattern(tensor, table, 77);
    EXPECT_EQ(count_wrong(tensor, table, 77), 0) << name;
    for (int64_t position : {int64_t{0}, kPeriod - 78, 2 * kPeriod, 3 * kPeriod + 4})
      tensor[position] = dtype == at::kBool ? at::Scalar(!tensor[position].item<bool>())
                                            : at::Scalar(tensor[position].item<double>() + 1);
    EXPECT_EQ(count_wrong(tensor, table, 77), 4) << name;
  }
}

TEST(BenchPattern, TakesNoNumberForWrong) {
  const auto table = reduced_table(2, at::kFloat, ReduceOp::kAvg);
  const auto tensor = table.clone();
  tensor[5] = std::nan("");
  EXPECT_EQ(count_wrong(tensor, table, 0, 1e-3), 1);
}

TEST(BenchPattern, TellsAMissingAndADoubledContribution) {
  constexpr int kRanks = 3;
  const auto expected = reduced_table(kRanks, at::kFloat, ReduceOp::kSum);
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto input = input_table(rank, at::kFloat, ReduceOp::kSum);
    EXPECT_EQ(count_wrong(expected - input, expected, 0), kPeriod);
    EXPECT_EQ(count_wrong(expected + input, expected, 0), kPeriod);
  }
}

TEST(BenchPattern, TellsWhatIsInAnotherPlace) {
  const auto table = reduced_table(2, at::kFloat, ReduceOp::kSum);
  for (int64_t moved : {1, 2, 64, 1024, 4096}) {
    const auto tensor = at::empty({8 * kPeriod}, at::kFloat);
    write_pattern(tensor, table, moved);
    EXPECT_GT(count_wrong(tensor, table, 0), 6 * kPeriod) << moved;
  }
}

/// Whether docs/collectives.md has a result.
bool is_defined(ReduceOp op, at::ScalarType dtype) {
  const bool is_floating = at::isFloatingType(dtype);
  const bool is_bitwise = op == ReduceOp::kAnd || op == ReduceOp::kOr || op == ReduceOp::kXor;
  return is_floating ? !is_bitwise : op != ReduceOp::kAvg;
}

TEST(BenchPattern, KnowsWhatEveryReductionGives) {
  for (int ranks : {1, 2, 3, 7})
    run_threads(ranks, [&](const ProcessGroup& world) {
      for (const auto& name : dtype_names())
        for (ReduceOp op : kAllOps) {
          const auto dtype = dtype_named(name);
          if (!is_defined(op, dtype)) continue;
          const auto tensor = input_table(world.rank(), dtype, op);
          world.all_reduce(tensor, op);
          EXPECT_EQ(count_wrong(tensor, reduced_table(ranks, dtype, op), 0, tolerance_of(dtype, op)), 0)
              << name << " " << static_cast<int>(op) << " on " << ranks;
        }
    });
}

/// A backend that returns at once and moves nothing.
class IdleBackend final : public Backend {
 public:
  at::Tensor allocate(int64_t bytes) override {
    const auto memory = std::make_shared<std::vector<char>>(static_cast<size_t>(bytes));
    return at::from_blob(
        memory->data(), {bytes}, [memory](void*) {}, at::kByte);
  }
  void abort(std::exception_ptr) noexcept override {}
  void all_reduce(const at::Tensor&, ReduceOp, const CallInfo&) override {}
  void reduce(const at::Tensor&, ReduceOp, int, const CallInfo&) override {}
  void broadcast(const at::Tensor&, int, const CallInfo&) override {}
  void all_gather(const at::Tensor&, const at::Tensor&, const CallInfo&) override {}
  void reduce_scatter(const at::Tensor&, const at::Tensor&, ReduceOp, const CallInfo&) override {}
  void all_to_all_v(const std::vector<at::Tensor>&, const std::vector<at::Tensor>&, const CallInfo&) override {}
  void barrier(const CallInfo&) override {}
  std::unique_ptr<Transfer> start_send(const at::Tensor&, int, uint32_t, uint64_t) override { return nullptr; }
  std::unique_ptr<Transfer> start_recv(const at::Tensor&, int, uint32_t, uint64_t) override { return nullptr; }
};

void register_idle() {
  static const bool is_done = [] {
    register_backend("idle", [](const BackendContext&) { return std::make_unique<IdleBackend>(); });
    return true;
  }();
  ASSERT_TRUE(is_done);
}

constexpr Operation kWithData[] = {Operation::kAllReduce, Operation::kReduceScatter, Operation::kAllGather,
                                   Operation::kBroadcast};

/// The wrong elements that all ranks find.
int64_t wrong_on(const std::string& backend, Operation operation, int ranks, int64_t bytes) {
  std::atomic<int64_t> wrong = 0;
  run_threads(ranks, [&](const ProcessGroup& world) {
    std::vector<int> all;
    for (int rank = 0; rank < ranks; ++rank) all.push_back(rank);
    const auto group = world.new_group(all, {.backend = backend});
    CollectivePlan plan;
    plan.operation = operation;
    const auto side = make_collective(plan, group, Memory::kAllocated, bytes);
    for (int64_t turn = 1; turn < 4; ++turn) {
      side->prepare(turn);
      side->run();
      wrong += side->count_wrong();
    }
  });
  return wrong;
}

TEST(BenchCollective, FindsRightResultsRight) {
  for (Operation operation : kWithData)
    for (int64_t bytes : {12, 3072, 120000})
      EXPECT_EQ(wrong_on("threads", operation, 3, bytes), 0) << name_of(operation);
}

TEST(BenchCollective, FindsOutABackendThatDoesNothing) {
  register_idle();
  for (Operation operation : kWithData)
    for (int64_t bytes : {3072, 120000})
      EXPECT_GT(wrong_on("idle", operation, 3, bytes), bytes / 4) << name_of(operation);
}

TEST(BenchCollective, FindsOutWhatAnEarlierTurnHasLeft) {
  run_threads(2, [](const ProcessGroup& world) {
    for (Operation operation : {Operation::kReduceScatter, Operation::kAllGather}) {
      CollectivePlan plan;
      plan.operation = operation;
      const auto side = make_collective(plan, world, Memory::kOrdinary, 100000);
      side->prepare(1);
      side->run();
      EXPECT_EQ(side->count_wrong(), 0) << name_of(operation);
      side->prepare(2);
      EXPECT_GT(side->count_wrong(), 10000) << name_of(operation);
    }
  });
}

TEST(BenchCollective, KnowsWhoHasMemoryOfItsOwn) {
  register_idle();
  run_threads(2, [](const ProcessGroup& world) {
    EXPECT_FALSE(has_own_memory(world));
    EXPECT_TRUE(has_own_memory(world.new_group({0, 1}, {.backend = "idle"})));
  });
}

int64_t wrong_barriers(const std::string& backend) {
  PageFile file(2);
  std::atomic<int64_t> wrong = 0;
  run_threads(2, [&](const ProcessGroup& world) {
    SharedPage page(file.path(), world.rank(), 2, true);
    const auto side = make_barrier(world.new_group({0, 1}, {.backend = backend}), page);
    for (int64_t turn = 1; turn < 5; ++turn) {
      side->prepare(turn);
      side->run();
      wrong += side->count_wrong();
    }
  });
  return wrong;
}

TEST(BenchBarrier, FindsOutOneThatDoesNotWait) {
  register_idle();
  EXPECT_EQ(wrong_barriers("threads"), 0);
  EXPECT_GT(wrong_barriers("idle"), 0);
}

TEST(SharedPage, CombinesWhatRanksGive) {
  constexpr int kRanks = 3;
  PageFile file(kRanks);
  run_threads(kRanks, [&](const ProcessGroup& world) {
    SharedPage page(file.path(), world.rank(), kRanks, true);
    for (int round = 0; round < 100; ++round) {
      EXPECT_EQ(page.max(world.rank() + round), 2 + round);
      EXPECT_EQ(page.sum(world.rank() + round), 3 + 3 * round);
      EXPECT_EQ(page.broadcast(world.rank() + round), round);
    }
    EXPECT_GT(page.round_trip_us(100), 0);
  });
}

TEST(SharedPage, LetsNobodyPassBeforeTheLast) {
  constexpr int kRanks = 3;
  PageFile file(kRanks);
  std::atomic<int> arrived = 0;
  run_threads(kRanks, [&](const ProcessGroup& world) {
    SharedPage page(file.path(), world.rank(), kRanks, true);
    for (int round = 1; round <= 200; ++round) {
      ++arrived;
      page.barrier();
      EXPECT_GE(arrived.load(), kRanks * round);
    }
  });
}

TEST(BenchPinning, DealsCoresEvenly) {
  EXPECT_THAT(cores_of_rank({0, 1, 2, 3, 4}, 0, 2), ElementsAre(0, 1));
  EXPECT_THAT(cores_of_rank({0, 1, 2, 3, 4}, 1, 2), ElementsAre(2, 3));
  EXPECT_THAT(cores_of_rank({4, 6}, 1, 2), ElementsAre(6));
  EXPECT_THAT(cores_of_rank({0}, 1, 2), ElementsAre());
}

TEST(BenchMeasure, TellsEverythingInItsOrder) {
  register_idle();
  CollectivePlan plan;
  plan.backends = {"threads", "idle"};
  plan.sizes = {1024, 200000};
  plan.rounds = 6;
  plan.oversubscribed = true;
  PageFile file(2);
  std::vector<CollectiveMessage> told;
  run_threads(2, [&](const ProcessGroup& world) {
    SharedPage page(file.path(), world.rank(), 2, plan.oversubscribed);
    measure_collective(plan, world, page, [&](const CollectiveMessage& message) { told.push_back(message); });
  });
  ASSERT_EQ(told.size(), 11U);  // the round trip; in both sizes progress, stream, one of threads and two of idle
  EXPECT_EQ(std::get<RoundTripTimes>(told[0]).times_us.size(), 21U);
  EXPECT_EQ(std::get<SizeStarted>(told[6]).bytes, 200000);
  EXPECT_EQ(std::get<StreamTimes>(told[7]).times_us.size(), 6U);
  const auto& right = std::get<CollectiveSamples>(told[8]);
  EXPECT_EQ(right.backend + " " + right.memory, "threads ordinary");
  EXPECT_EQ(right.wrong, 0);
  EXPECT_EQ(right.times_us.size(), 6U);
  const auto& wrong = std::get<CollectiveSamples>(told[9]);
  EXPECT_EQ(wrong.backend + " " + wrong.memory, "idle allocated");
  EXPECT_GE(wrong.wrong, 2 * 6 * 50000);  // on both ranks, in every round, every element
  EXPECT_EQ(std::get<CollectiveSamples>(told[10]).memory, "ordinary");
}

}  // namespace
}  // namespace lockstep::bench
