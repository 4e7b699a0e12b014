#include <signal.h>

#include <cstdlib>
#include <filesystem>

#include "bench_process.h"
#include "support/send_signal.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using nlohmann::json;
using testing::ContainsRegex;

constexpr const char* kOwnSides[] = {"save", "load", "load_unverified", "copy", "first_async", "later_async"};

bool is_empty(const TemporaryFolder& folder) {
  return std::filesystem::is_empty(folder.path());
}

void expect_sound(const json& row, const std::string& side) {
  EXPECT_GT(row[side + "_p10_ms"], 0.0) << side;
  EXPECT_LE(row[side + "_p10_ms"], row[side + "_ms"]) << side;
  EXPECT_LE(row[side + "_ms"], row[side + "_p90_ms"]) << side;
}

/// Measures in a folder of its own, which must be empty afterwards.
json measure(const std::string& arguments) {
  const TemporaryFolder folder;
  const auto ran = run_bench("checkpoint --bytes 8M --rounds 2 --json --folder " + folder.path().string() + arguments);
  EXPECT_EQ(ran.code, 0) << ran.output;
  EXPECT_TRUE(is_empty(folder));
  return ran.code == 0 ? objects_in(ran.output).at(0) : json();
}

TEST(BenchCheckpointCommand, PrintsOneCheckedObject) {
  const auto row = measure("");
  ASSERT_FALSE(row.is_null());
  EXPECT_EQ(row["op"], "checkpoint");
  EXPECT_EQ(row["rounds"], 2);
  EXPECT_EQ(row["wrong"], 0);
  for (const char* side : kOwnSides) expect_sound(row, side);
  EXPECT_GT(row["sha256_gbps"], 0.0);
  EXPECT_GT(row["crc32_gbps"], 0.0);
  EXPECT_TRUE(row.at("python_save_ms").is_null());
  EXPECT_TRUE(row.at("save_ratio_to_python").is_null());
}

/// Each interpreter that tests/CMakeLists.txt has found, named by a variable.
class BenchCheckpointAgainstPython : public testing::TestWithParam<const char*> {};

TEST_P(BenchCheckpointAgainstPython, LoadsTheOtherSidesFiles) {
  const char* python = std::getenv(GetParam());
  if (!python || !*python) GTEST_SKIP() << GetParam() << " is not set: needs Python's torch";
  const auto row = measure(std::string(" --against python --python ") + python);
  ASSERT_FALSE(row.is_null());
  EXPECT_EQ(row["wrong"], 0);
  for (const char* side : kOwnSides) expect_sound(row, side);
  for (const char* side : {"python_save", "python_load"}) expect_sound(row, side);
  for (const char* ratio : {"save_ratio_to_python", "load_ratio_to_python", "load_unverified_ratio_to_python"})
    EXPECT_GT(row[ratio], 0.0) << ratio;
}

INSTANTIATE_TEST_SUITE_P(Pythons, BenchCheckpointAgainstPython,
                         testing::Values("LOCKSTEP_TEST_PYTHON", "LOCKSTEP_TEST_PYTHON_2X"),
                         [](const auto& variable) { return std::string(variable.param); });

TEST(BenchCheckpointCommand, PrintsATable) {
  const TemporaryFolder folder;
  const auto ran =
      run_bench("checkpoint --bytes 8M --rounds 2 --omp-threads 1 --no-check --folder " + folder.path().string());
  ASSERT_EQ(ran.code, 0) << ran.output;
  for (const char* line :
       {"^# lockstep ", "# 1 thread per side, ", "SHA-256 [0-9.]+ GB/s, CRC-32 ", "  load unverified +[0-9.]+ ",
        "# 2 rounds; tensors not checked\n", "  later async/copy +[0-9.]+x\n"})
    EXPECT_THAT(ran.output, ContainsRegex(line));
}

TEST(BenchCheckpointCommand, SaysWhatIsWrongWithItsArguments) {
  expect_usage_error("checkpoint --folder /there/is/no/such/folder", "there is no such folder");
  expect_usage_error("checkpoint --bytes 1024G", "two checkpoints need 6");
  expect_usage_error("checkpoint --plot a.svg", "checkpoint has one size");
  expect_usage_error("checkpoint --bytes 8M --against python --python /there/is/no/python",
                     "--against python needs a python3 that has torch");
}

TEST(BenchCheckpointCommand, RemovesItsFilesWhenItIsStopped) {
  const TemporaryFolder folder;
  RankProcess process(bench_command("checkpoint --bytes 8M --rounds 1000000 --folder " + folder.path().string()),
                      kClean);
  process.expect_line("# folder: ", std::chrono::minutes(1));
  EXPECT_FALSE(is_empty(folder));
  ASSERT_TRUE(send_signal(process.pid(), SIGTERM));
  EXPECT_EQ(process.wait(std::chrono::minutes(1)), 6);
  EXPECT_TRUE(is_empty(folder));
}

}  // namespace
}  // namespace lockstep
