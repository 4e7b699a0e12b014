#include <signal.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "bench_process.h"
#include "support/eventually.h"
#include "support/send_signal.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::Not;

void expect_sound_ddp(const json& row) {
  EXPECT_EQ(row["ranks"], 2);
  EXPECT_EQ(row["backend"], "shm");
  EXPECT_EQ(row["batch"], 32);
  EXPECT_EQ(row["rounds"], 5);
  EXPECT_EQ(row["wrong"], 0);
  for (const std::string side : {"local", "ddp", "alone"}) {
    EXPECT_GT(row[side + "_p10_ms"], 0.0) << side;
    EXPECT_LE(row[side + "_p10_ms"], row[side + "_ms"]) << side;
    EXPECT_LE(row[side + "_ms"], row[side + "_p90_ms"]) << side;
  }
  const double local = row["local_ms"], ddp = row["ddp_ms"], alone = row["alone_ms"];
  EXPECT_DOUBLE_EQ(row["exposed_ms"], ddp - local);
  EXPECT_DOUBLE_EQ(row["ratio_to_local"], ddp / local);
  EXPECT_DOUBLE_EQ(row["efficiency"], alone / ddp);
}

TEST(BenchDdpCommand, PrintsOneCheckedObjectForEachModel) {
  const auto ran = run_bench("ddp -n 2 --models small,cnn --rounds 5 --json");
  ASSERT_EQ(ran.code, 0) << ran.output;
  const auto rows = objects_in(ran.output);
  ASSERT_EQ(rows.size(), 2U) << ran.output;
  EXPECT_EQ(rows[0]["model"], "small");
  EXPECT_EQ(rows[1]["model"], "cnn");
  for (const auto& row : rows) {
    expect_sound_ddp(row);
    EXPECT_TRUE(row.at("python_ms").is_null());
    EXPECT_TRUE(row.at("ratio_to_python").is_null());
  }
}

TEST(BenchDdpCommand, PrintsATable) {
  const auto ran = run_bench("ddp -n 2 --models small --rounds 5 --backend gloo --no-check");
  ASSERT_EQ(ran.code, 0) << ran.output;
  EXPECT_THAT(ran.output, testing::StartsWith("# lockstep "));
  EXPECT_THAT(ran.output, HasSubstr("; backend gloo; "));
  for (const char* line :
       {"small +local +[0-9.]+ +[0-9.]+ +[0-9.]+ *\n", "small +ddp +[0-9.]+ +[0-9.]+ +[0-9.]+ +N/A\n", "small +alone ",
        "# 5 rounds per model; results not checked\n", "small +[-0-9.]+ +[-0-9.]+ "})
    EXPECT_THAT(ran.output, testing::ContainsRegex(line));
  EXPECT_THAT(ran.output, Not(HasSubstr("\033")));  // no progress on a pipe
}

TEST(BenchDdpCommand, SaysWhatIsWrongWithItsArguments) {
  expect_usage_error("ddp --backend tpu", "unknown backend 'tpu'; this build has auto, ");
  expect_usage_error("ddp --plot a.svg", "ddp has no sizes");
}

TEST(BenchDdpCommand, SaysThatNoPythonHasTorch) {
  TemporaryFolder folder;
  std::ofstream(folder.path() / "torch.py") << "raise ImportError('this torch is a fake')\n";
  const std::map<std::string, std::string> variables{{"PYTHONPATH", folder.path().string()}};
  const auto ran = run_bench("ddp --against python", variables);
  EXPECT_EQ(ran.code, 2) << ran.output;
  EXPECT_THAT(ran.output, HasSubstr("--against python needs a python3 that has torch"));
  EXPECT_THAT(ran.output, HasSubstr("/usr/bin/python3 "));
}

/// Where Python has torch, as tests/CMakeLists.txt has found out.
class BenchDdpAgainstPython : public testing::Test {
 protected:
  void SetUp() override {
    const std::string python = std::getenv("LOCKSTEP_TEST_PYTHON") ? std::getenv("LOCKSTEP_TEST_PYTHON") : "";
    if (python.empty()) GTEST_SKIP() << "needs Python's torch: apt-get install python3-torch";
    variables_ = kClean;
    variables_["BENCH_TEST_MARK"] = mark_;
    if (python.find('/') != python.npos)
      variables_["PATH"] = std::filesystem::path(python).parent_path().string() + ":" + std::getenv("PATH");
  }

  void expect_both_measured(const std::string& models, size_t count);

  /// The processes of this test whose command line has `part`, zombies excepted.
  std::vector<int> running(const std::string& part) const {
    std::vector<int> found;
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
      const int pid = std::atoi(entry.path().filename().c_str());
      if (pid > 0 && content(entry.path() / "environ").find("BENCH_TEST_MARK=" + mark_) != std::string::npos &&
          content(entry.path() / "cmdline").find(part) != std::string::npos)
        found.push_back(pid);
    }
    return found;
  }

  /// At work, and Python's ranks, too.
  std::unique_ptr<RankProcess> start_long_run() const {
    auto process = std::make_unique<RankProcess>(
        bench_command("ddp --models small --rounds 100000000 --against python"), variables_);
    process->expect_line("# batch 32", std::chrono::minutes(2));
    EXPECT_EQ(running("python_rank.py").size(), 2U);
    return process;
  }

  std::map<std::string, std::string> variables_;

 private:
  static std::string content(const std::filesystem::path& file) {
    std::ostringstream text;
    text << std::ifstream(file).rdbuf();
    return text.str();
  }

  const std::string mark_ = "of " + std::to_string(::getpid());
};

void BenchDdpAgainstPython::expect_both_measured(const std::string& models, size_t count) {
  const auto ran = run_bench("ddp -n 2 --rounds 5 --against python --json --models " + models, variables_);
  ASSERT_EQ(ran.code, 0) << ran.output;
  const auto rows = objects_in(ran.output);
  ASSERT_EQ(rows.size(), count) << ran.output;
  for (const auto& row : rows) {
    expect_sound_ddp(row);
    const double python = row["python_ms"], ddp = row["ddp_ms"];
    EXPECT_GT(python, 0);
    EXPECT_DOUBLE_EQ(row["ratio_to_python"], python / ddp);
  }
  EXPECT_EQ(running("").size(), 0U);
}

TEST_F(BenchDdpAgainstPython, MeasuresBothInOneRun) {
  expect_both_measured("small,cnn", 2);
}

TEST_F(BenchDdpAgainstPython, MeasuresTheLargeModelBesidePythons) {
  expect_both_measured("mlp", 1);
}

TEST_F(BenchDdpAgainstPython, LeavesNobodyBehindWhenItIsStopped) {
  const auto process = start_long_run();
  process->signal(SIGTERM);
  EXPECT_EQ(process->wait(), 6) << process->output();
  EXPECT_THAT(running(""), testing::IsEmpty());
}

TEST_F(BenchDdpAgainstPython, LeavesNobodyBehindWhenItIsKilled) {
  const auto process = start_long_run();
  process->signal(SIGKILL);
  EXPECT_EQ(process->wait(), 128 + SIGKILL);
  EXPECT_TRUE(eventually([&] { return running("").empty(); }));
}

TEST_F(BenchDdpAgainstPython, SaysThatARankOfPythonIsGone) {
  const auto process = start_long_run();
  const auto ranks = running("python_rank.py");
  ASSERT_FALSE(ranks.empty());
  ASSERT_TRUE(send_signal(ranks[0], SIGKILL));
  EXPECT_EQ(process->wait(), 3) << process->output();
  EXPECT_THAT(process->output(), testing::ContainsRegex("Python rank [01] has ended"));
  EXPECT_THAT(running(""), testing::IsEmpty());
}

}  // namespace
}  // namespace lockstep
