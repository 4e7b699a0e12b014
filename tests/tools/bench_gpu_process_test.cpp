#include "bench_process.h"

namespace lockstep {
namespace {

using testing::HasSubstr;

bool has_gpu() {
  RankProcess process({LOCKSTEP_BENCH, "--gpus"}, {});
  EXPECT_EQ(process.wait(), 0);
  return process.output() != "[]\n";
}

TEST(BenchGpuCommand, MeasuresAllSidesInOneRun) {
  if (!has_gpu()) GTEST_SKIP() << "this machine has no GPU";
  const auto ran = run_bench("gpu --models mlp-small,gpt-6x384 --rounds 5 --against python --json");
  ASSERT_EQ(ran.code, 0) << ran.output;
  const auto rows = objects_in(ran.output);
  ASSERT_EQ(rows.size(), 2U) << ran.output;
  EXPECT_EQ(rows[0]["model"], "mlp-small");
  EXPECT_EQ(rows[1]["model"], "gpt-6x384");
  for (const auto& row : rows) {
    EXPECT_EQ(row["rounds"], 5);
    EXPECT_EQ(row["wrong"], 0) << row;
    for (const std::string side :
         {"plain", "ddp", "captured", "python_plain", "python_graph", "python_ddp", "python_best"}) {
      EXPECT_GT(row[side + "_p10_ms"], 0.0) << side;
      EXPECT_LE(row[side + "_p10_ms"], row[side + "_p90_ms"]) << side;
      EXPECT_GT(row[side + "_peak_bytes"], 1 << 20) << side;
    }
    for (const char* ratio : {"ratio_to_plain", "ratio_to_python", "ratio_to_python_best",
                              "captured_ratio_to_python_graph", "memory_to_python"})
      EXPECT_GT(row[ratio], 0.0) << ratio;
  }
}

TEST(BenchGpuCommand, SaysWhatIsWrongWithItsArguments) {
  expect_usage_error("gpu -n 2", "-n is 2: gpu measures");
  expect_usage_error("gpu --plot a.svg", "gpu has no sizes");
  expect_usage_error("gpu --models resnet", "unknown model 'resnet'; it must be one of mlp-small");
  if (!has_gpu()) expect_usage_error("gpu", "gpu needs a GPU");
}

}  // namespace
}  // namespace lockstep
