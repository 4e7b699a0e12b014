#include <fstream>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "bench_process.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::Not;

void expect_sound(const json& row) {
  for (const char* field :
       {"op", "backend", "memory", "ranks", "bytes", "count", "dtype", "redop", "time_us", "p10_us", "p90_us",
        "algbw_gbps", "busbw_gbps", "wrong", "floor_us", "floor_fraction", "rounds", "calls"})
    EXPECT_TRUE(row.contains(field)) << field;
  EXPECT_EQ(row["wrong"], 0);
  EXPECT_EQ(row["rounds"], 5);
  EXPECT_GT(row["p10_us"], 0.0);
  EXPECT_LE(row["p10_us"], row["time_us"]);
  EXPECT_LE(row["time_us"], row["p90_us"]);
  EXPECT_GT(row["floor_us"], 0.0);
}

TEST(BenchCommand, PrintsOneCheckedObjectForEachSizeAndDrawsAPlot) {
  TemporaryFolder folder;
  const auto file = (folder.path() / "times.svg").string();
  const auto ran = run_bench("all-reduce --backends gloo -n 2 --sizes 4,1K,300K --rounds 5 --json --plot " + file);
  ASSERT_EQ(ran.code, 0) << ran.output;
  const auto rows = objects_in(ran.output);
  ASSERT_EQ(rows.size(), 3U) << ran.output;
  for (const auto& row : rows) {
    expect_sound(row);
    EXPECT_EQ(row["op"], "all-reduce");
    EXPECT_EQ(row["backend"], "gloo");
    EXPECT_EQ(row["memory"], "ordinary");
    EXPECT_EQ(row["ranks"], 2);
    EXPECT_EQ(row["dtype"], "float32");
    EXPECT_EQ(row["redop"], "sum");
    EXPECT_DOUBLE_EQ(row["algbw_gbps"], row["busbw_gbps"]);  // of two ranks
  }
  EXPECT_EQ(rows[1]["bytes"], 1024);
  EXPECT_EQ(rows[2]["count"], 76800);
  std::ostringstream svg;
  svg << std::ifstream(file).rdbuf();
  EXPECT_THAT(svg.str(), testing::StartsWith("<svg "));
  EXPECT_THAT(svg.str(), HasSubstr(">gloo, ordinary<"));
  EXPECT_THAT(svg.str(), testing::EndsWith("</svg>\n"));
}

TEST(BenchCommand, ComparesBackendsInOneRun) {
  const auto ran =
      run_bench("reduce-scatter --backends shm,gloo -n 3 --sizes 64K --rounds 5 --dtype bfloat16 --op avg");
  ASSERT_EQ(ran.code, 0) << ran.output;
  EXPECT_THAT(ran.output, testing::StartsWith("# lockstep "));
  EXPECT_THAT(ran.output, testing::ContainsRegex("65532 +10922 bfloat16 +avg +shm +allocated "));
  EXPECT_THAT(ran.output, testing::ContainsRegex("65532 +10922 bfloat16 +avg +gloo +ordinary "));
  EXPECT_THAT(ran.output, HasSubstr("# 5 rounds per size; all correct\n"));
  EXPECT_THAT(ran.output, HasSubstr("# times relative to shm, allocated\n"));
  EXPECT_THAT(ran.output, Not(HasSubstr("\033")));  // no progress on a pipe
}

TEST(BenchCommand, MeasuresEveryOperation) {
  for (const char* arguments : {"all-gather --sizes 1K --dtype int8", "broadcast --sizes 100K --dtype float64",
                                "barrier", "all-reduce --sizes 4 --op max --dtype int64"}) {
    const auto ran = run_bench(std::string(arguments) + " --backends gloo -n 2 --rounds 5 --json");
    ASSERT_EQ(ran.code, 0) << arguments << "\n" << ran.output;
    const auto rows = objects_in(ran.output);
    ASSERT_EQ(rows.size(), 1U) << ran.output;
    expect_sound(rows[0]);
  }
}

TEST(BenchCommand, SaysWhatIsWrongWithItsArguments) {
  expect_usage_error("", "operation is required");
  expect_usage_error("all-reduce --backends tpu", "unknown backend 'tpu'; this build has ");
  expect_usage_error("all-reduce --sizes 4 --max 8", "--max");
  expect_usage_error("all-reduce --sizes 512G", "use a smaller --max");
  expect_usage_error("all-reduce --plot /nowhere/a.svg", "/nowhere is not writable");
  expect_usage_error("barrier --plot a.svg", "a barrier has no size");
}

TEST(BenchCommand, StopsWhenItIsTold) {
  RankProcess process(bench_command("all-reduce --backends gloo --sizes 4 --rounds 100000000"), kClean);
  process.expect_line("# round trip of a flag");  // the ranks are at work
  process.signal(SIGTERM);
  EXPECT_EQ(process.wait(std::chrono::seconds(20)), 6) << process.output();
  EXPECT_THAT(process.output(), HasSubstr("stopped by SIGTERM"));
}

#ifdef LOCKSTEP_HAVE_MPI
TEST(BenchCommand, DoesWithoutMpiWhereThereIsNoMpirun) {
  TemporaryFolder nothing;
  const std::map<std::string, std::string> variables{{"PATH", nothing.path().string()}};
  const auto all = run_bench("all-reduce --sizes 4 --rounds 5 --no-check", variables);
  EXPECT_EQ(all.code, 0) << all.output;
  EXPECT_THAT(all.output, HasSubstr("# 5 rounds per size; results not checked\n"));
  EXPECT_THAT(all.output, HasSubstr("skipping mpi: mpirun, which starts its ranks, is not in PATH"));
  const auto asked = run_bench("all-reduce --sizes 4 --rounds 5 --backends shm,mpi", variables);
  EXPECT_EQ(asked.code, 2) << asked.output;
  EXPECT_THAT(asked.output, HasSubstr("--backends: mpi cannot be measured: mpirun, which starts its ranks"));
}
#endif

}  // namespace
}  // namespace lockstep
