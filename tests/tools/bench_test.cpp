#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/error.h>

#include "bench/collective_report.h"
#include "bench/launch_ranks.h"
#include "bench/operation.h"
#include "bench/rank_protocol.h"
#include "bench/report_format.h"
#include "bench/request.h"
#include "support/messages.h"

namespace lockstep::bench {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

TEST(BenchSizes, ReadsBinaryUnits) {
  EXPECT_EQ(parse_bytes("--min", "4"), 4);
  EXPECT_EQ(parse_bytes("--min", "64K"), 65536);
  EXPECT_EQ(parse_bytes("--min", "25M"), 26214400);
  EXPECT_EQ(parse_bytes("--min", "1024G"), int64_t{1} << 40);
}

TEST(BenchSizes, NamesTheOptionThatIsNoSize) {
  for (const char* written : {"", "0", "-4", "4.5", "4k", "4MB", "K", "1025G", "99999999999999999999", " 4", "4 "})
    expect_error<UsageError>([&] { parse_bytes("--max", written); },
                             "--max is \"" + std::string(written) + "\": it must be a number of bytes");
}

TEST(BenchSizes, AreWrittenAsTheyAreRead) {
  for (int64_t bytes : {4LL, 1000LL, 1024LL, 1536LL, 26214400LL, 1LL << 30, (1LL << 30) + 1024})
    EXPECT_EQ(parse_bytes("--min", format_size(bytes)), bytes);
  EXPECT_EQ(format_size(26214400), "25M");
}

TEST(BenchSizes, GoFromTheLeastToTheMost) {
  EXPECT_THAT(size_range(4, 32, 2), ElementsAre(4, 8, 16, 32));
  EXPECT_THAT(size_range(4, 33, 4), ElementsAre(4, 16));
  EXPECT_THAT(size_range(7, 7, 2), ElementsAre(7));
  expect_error<UsageError>([] { size_range(8, 4, 2); }, "--min is 8 and --max is 4");
  expect_error<UsageError>([] { size_range(4, 8, 1); }, "--factor is 1");
}

TEST(BenchSizes, AreWholeElementsOnEveryRank) {
  EXPECT_THAT(round_to_elements(Operation::kAllReduce, {1, 4, 7, 9}, 4, 3), ElementsAre(4, 8));
  EXPECT_THAT(round_to_elements(Operation::kReduceScatter, {4, 8, 16, 30}, 4, 3), ElementsAre(12, 24));
  EXPECT_EQ(element_count(Operation::kAllGather, 24, 4, 3), 2);
  EXPECT_EQ(element_count(Operation::kBroadcast, 24, 4, 3), 6);
}

TEST(BenchSizes, SmallMessagesShareASample) {
  EXPECT_EQ(calls_per_sample(0), 64);
  EXPECT_EQ(calls_per_sample(1024), 64);
  EXPECT_EQ(calls_per_sample(32768), 2);
  EXPECT_EQ(calls_per_sample(65536), 1);
  EXPECT_EQ(calls_per_sample(1 << 30), 1);
}

TEST(BenchStatistics, InterpolatesBetweenNeighbours) {
  EXPECT_DOUBLE_EQ(median({3, 1, 2}), 2);
  EXPECT_DOUBLE_EQ(median({4, 1, 2, 3}), 2.5);
  EXPECT_DOUBLE_EQ(percentile({10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110}, 0.1), 20);
  EXPECT_DOUBLE_EQ(percentile({0, 10}, 0.9), 9);
  EXPECT_DOUBLE_EQ(percentile({7}, 0.9), 7);
  EXPECT_DOUBLE_EQ(median({}), 0);
}

TEST(BenchOperation, HasTheFactorsOfNcclTests) {
  EXPECT_DOUBLE_EQ(bus_factor(Operation::kAllReduce, 4), 1.5);
  EXPECT_DOUBLE_EQ(bus_factor(Operation::kReduceScatter, 4), 0.75);
  EXPECT_DOUBLE_EQ(bus_factor(Operation::kAllGather, 4), 0.75);
  EXPECT_DOUBLE_EQ(bus_factor(Operation::kBroadcast, 4), 1);
}

TEST(BenchOperation, IsFoundByItsName) {
  auto collectives = operation_names();
  std::erase(collectives, kDdp);
  std::erase(collectives, kGpu);
  std::erase(collectives, kCheckpoint);
  for (const auto& name : collectives) EXPECT_EQ(name_of(operation_named(name)), name);
  EXPECT_EQ(operation_named("all_reduce"), Operation::kAllReduce);
  expect_error<UsageError>([] { operation_named("allreduce"); },
                           "unknown operation 'allreduce': it must be one of all-reduce, reduce-scatter",
                           "barrier, ddp, gpu, checkpoint");
}

TEST(BenchFloor, IsTheMemorysTimeForLargeMessages) {
  // Two ranks read and write 100 bytes each in 10 us: 400 bytes. That is an all-reduce; a broadcast moves half of it.
  const Floor floor{.round_trip_us = 1, .stream_us = 10, .bytes = 100};
  EXPECT_DOUBLE_EQ(*floor_us(Operation::kAllReduce, 2, floor), 10);
  EXPECT_DOUBLE_EQ(*floor_us(Operation::kReduceScatter, 2, floor), 7.5);
  EXPECT_DOUBLE_EQ(*floor_us(Operation::kAllGather, 2, floor), 7.5);
  EXPECT_DOUBLE_EQ(*floor_us(Operation::kBroadcast, 2, floor), 5);
}

TEST(BenchFloor, IsTheWayOfAFlagForSmallOnes) {
  const Floor floor{.round_trip_us = 1, .stream_us = 0.1, .bytes = 4};
  EXPECT_DOUBLE_EQ(*floor_us(Operation::kAllReduce, 2, floor), 0.5);
  EXPECT_DOUBLE_EQ(*floor_us(Operation::kBarrier, 2, {.round_trip_us = 1, .stream_us = 0, .bytes = 0}), 0.5);
  EXPECT_EQ(floor_us(Operation::kAllReduce, 1, floor), std::nullopt);
}

Request request(const std::string& operation) {
  Request request;
  request.operation = operation;
  return request;
}

TEST(BenchRequest, TakesAllBackendsOfProcessesFastestFirst) {
  const auto plan = make_collective_plan(request("all-reduce"), {"gloo", "mine", "shm", "threads"});
  EXPECT_THAT(plan.backends, ElementsAre("shm", "gloo", "mine"));
  EXPECT_EQ(plan.sizes.front(), 4);
  EXPECT_EQ(plan.sizes.back(), 64 << 20);
  EXPECT_EQ(plan.sizes.size(), 13U);
  EXPECT_EQ(plan.redop, "sum");
  EXPECT_EQ(plan.memory, Memory::kBoth);
}

TEST(BenchRequest, KeepsTheOrderThatIsAskedFor) {
  auto asked = request("all-reduce");
  asked.backends = {"gloo", "shm"};
  asked.sizes = {"25M", "4"};
  const auto plan = make_collective_plan(asked, {"gloo", "shm"});
  EXPECT_THAT(plan.backends, ElementsAre("gloo", "shm"));
  EXPECT_THAT(plan.sizes, ElementsAre(26214400, 4));
}

void expect_refusal(const Request& asked, const std::string& part) {
  expect_error<UsageError>([&] { make_collective_plan(asked, {"gloo", "shm", "threads"}); }, part);
}

TEST(BenchRequest, SaysWhatThisBuildHas) {
  auto asked = request("all-reduce");
  asked.backends = {"gloo", "nccl"};
  expect_refusal(asked, "unknown backend 'nccl'; this build has gloo, shm");
  asked.backends = {"threads"};
  expect_refusal(asked, "unknown backend 'threads'");
  asked.backends = {"gloo", "gloo"};
  expect_refusal(asked, "contains 'gloo' twice");
  expect_error<UsageError>([] { make_collective_plan(request("all-reduce"), {"threads"}); },
                           "no backend whose ranks are processes");
}

TEST(BenchRequest, RefusesWhatHasNoResult) {
  auto asked = request("all-reduce");
  asked.dtype = "int32";
  asked.redop = "avg";
  expect_refusal(asked, "--op avg is not defined for int32");
  asked.dtype = "float16";
  asked.redop = "xor";
  expect_refusal(asked, "--op xor is not defined for float16");
  asked.redop = "mean";
  expect_refusal(asked, "--op is \"mean\": it must be one of sum, avg");
  asked.dtype = "float8";
  expect_refusal(asked, "--dtype is \"float8\": it must be one of float32");
}

TEST(BenchRequest, RefusesWhatWouldHaveNoEffect) {
  auto asked = request("broadcast");
  asked.redop = "sum";
  expect_refusal(asked, "not to broadcast: remove it");
  asked = request("barrier");
  asked.max_size = "1M";
  expect_refusal(asked, "a barrier carries no data");
  asked = request("all-reduce");
  asked.models = {"cnn"};
  expect_refusal(
      asked,
      "--models, --against, --backend and --optimizer do not apply to all-reduce, only to ddp, gpu or checkpoint");
  EXPECT_THAT(make_collective_plan(request("barrier"), {"gloo"}).sizes, ElementsAre(0));
}

TEST(BenchRequest, RefusesNumbersOutOfRange) {
  auto asked = request("all-reduce");
  asked.ranks = 0;
  expect_refusal(asked, "-n is 0: it must be a number of ranks from 1");
  asked.ranks = 2;
  asked.rounds = 4;
  expect_refusal(asked, "--rounds is 4: it must be 5 or more");
  asked.rounds = 5;
  asked.memory = "fast";
  expect_refusal(asked, "--memory is \"fast\": it must be allocated, ordinary or both");
}

TEST(BenchPlan, SurvivesTheWayToTheRanks) {
  CollectivePlan plan = make_collective_plan(request("reduce-scatter"), {"gloo", "shm"});
  plan.dtype = "bfloat16";
  plan.memory = Memory::kAllocated;
  plan.rounds = 7;
  plan.check = false;
  plan.bind = plan.oversubscribed = true;
  plan.page = "/proc/1/fd/3";
  plan.results = "/proc/1/fd/4";
  EXPECT_EQ(collective_plan_from(to_text(plan)), plan);
}

TEST(BenchMessages, SurviveTheWayFromTheRanks) {
  const CollectiveMessage messages[] = {SizeStarted{1024}, RoundTripTimes{{0.25, 0.5}}, StreamTimes{4, {1.5}},
                                        CollectiveSamples{"shm", "allocated", 4, 64, 3, {1.0 / 3, 2}},
                                        CollectiveSamples{"gloo", "ordinary", 1 << 30, 1, std::nullopt, {}}};
  for (const auto& message : messages) {
    EXPECT_EQ(collective_message_from(to_line(message)), message);
    EXPECT_THAT(to_line(message), Not(HasSubstr("\n")));
  }
}

TEST(BenchRow, HasTheMedianAndTheBandwidths) {
  CollectivePlan plan = make_collective_plan(request("all-reduce"), {"gloo"});
  plan.ranks = 4;
  const Floor floor{.round_trip_us = 1, .stream_us = 5, .bytes = 4000};
  const auto row = make_collective_row(plan, {"gloo", "ordinary", 4000, 1, 0, {10, 8, 9, 12, 11}}, floor);
  EXPECT_EQ(row.count, 1000);
  EXPECT_DOUBLE_EQ(row.time_us, 10);
  EXPECT_DOUBLE_EQ(row.p10_us, 8.4);
  EXPECT_DOUBLE_EQ(row.p90_us, 11.6);
  EXPECT_DOUBLE_EQ(row.algbw_gbps, 0.4);
  EXPECT_DOUBLE_EQ(row.busbw_gbps, 0.6);
  EXPECT_DOUBLE_EQ(*row.floor_fraction, 0.5);
  EXPECT_EQ(row.rounds, 5U);
}

TEST(BenchRanks, AreStartedByOurLauncher) {
  const auto launch = rank_launch_options(3, "{}", {.command = {"/bin/lockstep-bench", "--ddp"}, .threads = 2});
  EXPECT_THAT(launch.command, ElementsAre("/bin/lockstep-bench", "--ddp", "{}"));
  EXPECT_EQ(launch.workers_per_node, "3");
  EXPECT_EQ(launch.omp_threads, 2);
  EXPECT_FALSE(launch.bind);  // ranks pin themselves, when the backends' threads are there
}

TEST(BenchRanks, AreStartedByMpirunWhereMpiTakesPart) {
  const auto launch = rank_launch_options(3, "{}", {.command = {"/bin/lockstep-bench"}, .by_mpirun = true});
  EXPECT_EQ(launch.workers_per_node, "1");
  ASSERT_GT(launch.command.size(), 5U);
  EXPECT_EQ(launch.command[0], "mpirun");
  EXPECT_EQ(launch.command[2], "3");
  EXPECT_THAT(launch.command, Contains("WORLD_SIZE"));  // is taken away: the one rank that our launcher speaks of
  EXPECT_EQ(launch.command[launch.command.size() - 2], "/bin/lockstep-bench");
  EXPECT_EQ(launch.command.back(), "{}");
}

}  // namespace
}  // namespace lockstep::bench
