// `lockstep bench checkpoint` without files: the request, the state and the report.

#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <lockstep/error.h>

#include "bench/checkpoint_plan.h"
#include "bench/checkpoint_report.h"
#include "bench/operation.h"
#include "bench/request.h"
#include "support/messages.h"

namespace lockstep::bench {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

Request checkpoint_request() {
  Request asked;
  asked.operation = kCheckpoint;
  return asked;
}

void expect_checkpoint_refusal(const Request& asked, const std::string& part) {
  expect_error<UsageError>([&] { make_checkpoint_plan(asked); }, part);
}

TEST(BenchCheckpointRequest, SavesOneGibibyteInFiveRounds) {
  const auto plan = make_checkpoint_plan(checkpoint_request());
  EXPECT_EQ(plan.rounds, 5);
  EXPECT_TRUE(plan.check);
  EXPECT_NEAR(static_cast<double>(plan.parameter_bytes()), 1 << 30, 1 << 20);
  EXPECT_EQ(plan.state_bytes(), 3 * plan.parameter_bytes());
}

TEST(BenchCheckpointRequest, KeepsWhatIsAskedFor) {
  auto asked = checkpoint_request();
  asked.bytes = "8M";
  asked.rounds = 2;
  asked.check = false;
  asked.against = "python";
  asked.python = "/opt/python3";
  const auto plan = make_checkpoint_plan(asked);
  EXPECT_EQ(plan.rounds, 2);
  EXPECT_FALSE(plan.check);
  EXPECT_NEAR(static_cast<double>(plan.parameter_bytes()), 8 << 20, 8 << 10);
}

TEST(BenchCheckpointRequest, RefusesWhatItCannotMeasure) {
  auto asked = checkpoint_request();
  asked.bytes = "1000K";
  expect_checkpoint_refusal(asked, "--bytes is 1000K: it must be 1M or more");
  asked = checkpoint_request();
  asked.bytes = "much";
  expect_checkpoint_refusal(asked, "--bytes is \"much\"");
  asked = checkpoint_request();
  asked.rounds = 1;
  expect_checkpoint_refusal(asked, "--rounds is 1");
  asked = checkpoint_request();
  asked.ranks = 2;
  asked.dtype = "float16";
  expect_checkpoint_refusal(asked, "has no use for --dtype, -n");
  asked = checkpoint_request();
  asked.against = "jax";
  expect_checkpoint_refusal(asked, "--against is \"jax\"");
  asked = checkpoint_request();
  asked.python = "python3";
  expect_checkpoint_refusal(asked, "--python names the interpreter of --against");
}

TEST(BenchCheckpointRequest, IsTheOnlyOneWithBytesAndFolder) {
  Request asked;
  asked.operation = "all-reduce";
  asked.bytes = "1G";
  expect_error<UsageError>([&] { make_collective_plan(asked, {"shm"}); }, "--bytes and --folder apply only to");
  asked.operation = kDdp;
  expect_error<UsageError>([&] { make_ddp_plan(asked, {"shm"}); }, "--bytes and --folder apply only to");
}

TEST(BenchCheckpointState, HasTheTensorsOfATransformer) {
  for (int64_t bytes : {int64_t{1} << 20, int64_t{8} << 20, int64_t{1} << 30, int64_t{40} << 30}) {
    const CheckpointPlan plan{.parameters = plan_parameters(bytes)};
    EXPECT_LE(plan.parameter_bytes(), bytes);
    EXPECT_GT(plan.parameter_bytes(), bytes - bytes / 100);
    EXPECT_GT(plan.parameters.size(), 12U * 6);
    EXPECT_LT(plan.parameters.size(), 12U * 70);
    EXPECT_EQ(checkpoint_plan_from(to_text(plan)).parameters, plan.parameters);
  }
  const auto parameters = plan_parameters(int64_t{1} << 30);
  EXPECT_EQ(parameters[3], (SavedParameter{"layer0_qkv_weight", {3072, 1024}}));
  EXPECT_EQ(parameters[3].bytes(), 12 << 20);
}

TEST(BenchCheckpointReport, KnowsProcessorsWithShaInstructions) {
  EXPECT_TRUE(has_sha_instructions("processor\t: 0\nflags\t\t: fpu sha_ni avx2\n"));
  EXPECT_TRUE(has_sha_instructions("processor\t: 0\nFeatures\t: fp asimd sha1 sha2 crc32\n"));
  EXPECT_FALSE(has_sha_instructions("model name\t: sha2 sha_ni\nflags\t\t: fpu avx2\n"));
  EXPECT_FALSE(has_sha_instructions(""));
}

CheckpointReport some_report() {
  return {.parameter_bytes = 1000000000,
          .state_bytes = 3000000000,
          .tensors = 732,
          .threads = 2,
          .folder = "/data",
          .has_sha_instructions = false,
          .sha256_gbps = 0.4,
          .crc32_gbps = 1.5,
          .libtorch = "1.13.0",
          .python_torch = "2.11.0",
          .times_us = {{CheckpointSide::kSave, {5e6, 6e6, 9e6}},
                       {CheckpointSide::kPythonSave, {1e7, 9e6, 9e6}},
                       {CheckpointSide::kLoad, {2e6, 2e6, 2e6}},
                       {CheckpointSide::kLoadUnverified, {1e6, 1e6, 1e6}},
                       {CheckpointSide::kPythonLoad, {3e6, 3e6, 3e6}},
                       {CheckpointSide::kCopy, {5e5, 5e5, 5e5}},
                       {CheckpointSide::kFirstAsync, {1e6, 1e6, 1e6}},
                       {CheckpointSide::kLaterAsync, {6e5, 5.5e5, 5e5}}}};
}

TEST(BenchCheckpointReport, ComparesRoundByRound) {
  const auto object = nlohmann::json::parse(to_json_line(some_report()));
  EXPECT_EQ(object["op"], "checkpoint");
  EXPECT_EQ(object["state_bytes"], 3000000000);
  EXPECT_EQ(object["rounds"], 3);
  EXPECT_EQ(object["save_ms"], 6000);
  EXPECT_EQ(object["python_save_ms"], 9000);
  EXPECT_EQ(object["has_sha_instructions"], false);
  EXPECT_DOUBLE_EQ(object["save_ratio_to_python"], 1.5);
  EXPECT_DOUBLE_EQ(object["load_ratio_to_python"], 1.5);
  EXPECT_DOUBLE_EQ(object["load_unverified_ratio_to_python"], 3);
  EXPECT_DOUBLE_EQ(object["first_async_ratio_to_copy"], 2);
  EXPECT_DOUBLE_EQ(object["later_async_ratio_to_copy"], 1.1);
  EXPECT_EQ(object["wrong"], 0);
}

TEST(BenchCheckpointReport, HasNothingOfPythonUnlessItWasMeasured) {
  auto report = some_report();
  report.python_torch.clear();
  report.is_checked = false;
  report.times_us.erase(CheckpointSide::kPythonSave);
  report.times_us.erase(CheckpointSide::kPythonLoad);
  const auto object = nlohmann::json::parse(to_json_line(report));
  for (const char* field : {"python_torch", "python_save_ms", "save_ratio_to_python", "load_ratio_to_python", "wrong"})
    EXPECT_TRUE(object.at(field).is_null()) << field;
  const auto table = checkpoint_table(report);
  EXPECT_THAT(table, Not(HasSubstr("python")));
  EXPECT_THAT(table, HasSubstr("tensors not checked"));
}

TEST(BenchCheckpointReport, PrintsATableOfAtMost110Columns) {
  auto report = some_report();
  const auto text =
      checkpoint_conditions(report, "2 cores of Intel(R) Xeon(R) Processor @ 2.50GHz") + checkpoint_table(report);
  for (const char* line :
       {"# processor has no SHA instructions; one thread: OpenSSL's SHA-256 0.40 GB/s, CRC-32 1.50 GB/s\n",
        "  save +6000 +5200 +8400 +0.50\n", "  load unverified +1000 ", "  python load +3000 ",
        "# 3 rounds; all tensors are right\n", "  python save/save +1.50x\n", "  later async/copy +1.10x\n"})
    EXPECT_THAT(text, ContainsRegex(line));
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 110U) << line;
  report.wrong = 1;
  EXPECT_THAT(checkpoint_table(report), HasSubstr("SOME TENSORS ARE WRONG"));
}

}  // namespace
}  // namespace lockstep::bench
