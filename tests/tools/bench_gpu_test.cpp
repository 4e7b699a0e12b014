// `lockstep bench gpu` without a GPU: what is asked for, who is asked, and what is made of the figures.

#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <lockstep/error.h>

#include "bench/coprocess.h"
#include "bench/gpu_report.h"
#include "bench/operation.h"
#include "bench/request.h"
#include "support/messages.h"

namespace lockstep::bench {
namespace {

using testing::ContainsRegex;
using testing::ElementsAre;
using testing::HasSubstr;

Request gpu_request() {
  Request asked;
  asked.operation = kGpu;
  return asked;
}

void expect_gpu_refusal(const Request& asked, const std::string& part) {
  expect_error<UsageError>([&] { make_gpu_plan(asked, {"a GPU"}); }, part);
}

TEST(BenchGpuRequest, TrainsAllModels) {
  const auto plan = make_gpu_plan(gpu_request(), {"a GPU"});
  EXPECT_THAT(plan.models, ElementsAre("mlp-small", "cnn", "gpt-6x384", "gpt-124m"));
  EXPECT_EQ(plan.rounds, 0);
  EXPECT_TRUE(plan.check);
}

TEST(BenchGpuRequest, KeepsWhatIsAskedFor) {
  auto asked = gpu_request();
  asked.models = {"gpt-124m", "cnn"};
  asked.rounds = 9;
  asked.check = false;
  asked.ranks = 1;
  const auto plan = make_gpu_plan(asked, {"a GPU"});
  EXPECT_THAT(plan.models, ElementsAre("gpt-124m", "cnn"));
  EXPECT_EQ(plan.rounds, 9);
  EXPECT_FALSE(plan.check);
}

TEST(BenchGpuRequest, RefusesWhatItCannotMeasure) {
  expect_error<UsageError>([] { make_gpu_plan(gpu_request(), {}); }, "gpu needs a GPU", "nvidia-smi");
  auto asked = gpu_request();
  asked.models = {"small"};
  expect_gpu_refusal(asked, "unknown model 'small'; it must be one of mlp-small, cnn");
  asked = gpu_request();
  asked.ranks = 2;
  expect_gpu_refusal(asked, "-n is 2: gpu measures");
  asked = gpu_request();
  asked.backend = "nccl";
  expect_gpu_refusal(asked, "remove --backend");
  asked = gpu_request();
  asked.sizes = {"4"};
  expect_gpu_refusal(asked, "gpu trains models and has no message options: remove --sizes");
  asked = gpu_request();
  asked.rounds = 2;
  expect_gpu_refusal(asked, "--rounds is 2");
  asked = gpu_request();
  asked.against = "jax";
  expect_gpu_refusal(asked, "--against is \"jax\"");
}

TEST(BenchGpuRequest, ComparesCompiledModelsWithTheseModesOfTorchCompile) {
  EXPECT_THAT(make_gpu_plan(gpu_request(), {"a GPU"}).compile_modes, testing::IsEmpty());
  auto asked = gpu_request();
  asked.against = "python";
  asked.compile_modes = {"default", "reduce-overhead"};
  EXPECT_THAT(make_gpu_plan(asked, {"a GPU"}).compile_modes, ElementsAre("default", "reduce-overhead"));
  asked.compile_modes = {"fast"};
  expect_gpu_refusal(asked, "--compile: unknown mode 'fast'; it must be one of default, reduce-overhead, max-autotune");
  asked.compile_modes = {"default"};
  asked.against = "";
  expect_gpu_refusal(asked, "--compile needs Python");
  asked.operation = kDdp;
  expect_error<UsageError>([&] { make_ddp_plan(asked, {"shm"}); }, "--compile applies only to gpu, not to ddp");
}

/// A step takes 10 ms, with DistributedDataParallel 11, captured 5, and in Python 12, 4, 22 and 16.5.
GpuRow some_row() {
  GpuRow row{.model = "cnn", .gpu = "a GPU", .steps = 7};
  row.samples = {{GpuSide::kPlain, {9000, 10000, 12000}, 100 << 20, 2.0},
                 {GpuSide::kDdp, {9900, 11000, 13200}, 110 << 20, 2.01},
                 {GpuSide::kCaptured, {4500, 5000, 6000}, 130 << 20, 2.0},
                 {GpuSide::kPythonPlain, {10800, 12000, 14400}, 100 << 20, 1.99},
                 {GpuSide::kPythonGraph, {3600, 4000, 4800}, 130 << 20, 2.0},
                 {GpuSide::kPythonDdp, {19800, 22000, 26400}, 120 << 20, 2.0},
                 {GpuSide::kPythonBest, {14850, 16500, 19800}, 110 << 20, 2.0}};
  return row;
}

TEST(BenchGpuRow, ComparesTheSides) {
  const auto object = nlohmann::json::parse(to_json_line(some_row()));
  EXPECT_EQ(object["op"], "gpu");
  EXPECT_EQ(object["model"], "cnn");
  EXPECT_EQ(object["gpu"], "a GPU");
  EXPECT_EQ(object["steps"], 7);
  EXPECT_EQ(object["rounds"], 3);
  EXPECT_EQ(object["plain_ms"], 10);
  EXPECT_DOUBLE_EQ(object["ddp_p90_ms"], 12.76);
  EXPECT_EQ(object["python_best_peak_bytes"], 110 << 20);
  EXPECT_EQ(object["python_plain_loss"], 1.99);
  EXPECT_DOUBLE_EQ(object["ratio_to_plain"], 1.1);
  EXPECT_DOUBLE_EQ(object["ratio_to_python"], 2);
  EXPECT_DOUBLE_EQ(object["ratio_to_python_best"], 1.5);
  EXPECT_DOUBLE_EQ(object["captured_ratio_to_python_graph"], 1.25);
  EXPECT_DOUBLE_EQ(object["memory_to_python"], 1);
  EXPECT_EQ(object["wrong"], 0);
}

TEST(BenchGpuRow, ComparesTheCompiledSidesWithTheFastestOfPython) {
  auto row = some_row();
  row.export_seconds = 61;
  row.samples.push_back({GpuSide::kCompiled, {4950, 5500, 6600}, 90 << 20, 2.0});
  row.samples.push_back({GpuSide::kCompiledCaptured, {2700, 3000, 3600}, 90 << 20, 2.0});
  row.samples.push_back({GpuSide::kPythonCompile, {5400, 6000, 7200}, 80 << 20, 2.0});
  row.samples.push_back({GpuSide::kPythonReduceOverhead, {3600, 4000, 4800}, 120 << 20, 2.0});
  EXPECT_EQ(row.best_compiled_in_python()->side, GpuSide::kPythonReduceOverhead);
  const auto object = nlohmann::json::parse(to_json_line(row));
  EXPECT_EQ(object["export_s"], 61);
  EXPECT_EQ(object["compiled_captured_ms"], 3);
  EXPECT_EQ(object["python_reduce_overhead_ms"], 4);
  EXPECT_TRUE(object["python_max_autotune_ms"].is_null());
  EXPECT_DOUBLE_EQ(object["compiled_captured_ratio_to_python"], 0.75);
  EXPECT_DOUBLE_EQ(object["compiled_captured_memory_to_python"], 0.75);
  EXPECT_THAT(gpu_comparison({row}), ContainsRegex("cnn +0.50x +0.50x +0.75x +- +0.75x +0.75x\n"));
  EXPECT_THAT(gpu_comparison({some_row()}), testing::Not(HasSubstr("compiled/ddp")));
}

TEST(BenchGpuRow, ComparesRoundByRound) {
  auto row = some_row();
  row.samples[0].times_us = {10000, 40000, 20000};  // the machine is slow for a while
  row.samples[1].times_us = {11000, 44000, 30000};
  EXPECT_DOUBLE_EQ(row.ratio(GpuSide::kDdp, GpuSide::kPlain).value(), 1.1);
}

TEST(BenchGpuRow, HasNothingOfPythonWhereItWasNotAsked) {
  auto row = some_row();
  row.samples.resize(3);
  row.is_checked = false;
  const auto object = nlohmann::json::parse(to_json_line(row));
  for (const char* field : {"python_plain_ms", "python_ddp_loss", "python_best_peak_bytes", "ratio_to_python",
                            "ratio_to_python_best", "captured_ratio_to_python_graph", "memory_to_python", "wrong"})
    EXPECT_TRUE(object.at(field).is_null()) << field;
  EXPECT_THAT(gpu_comparison({row}), ContainsRegex("cnn +1.10x +- +- +- +- +-\n"));
}

TEST(BenchGpuRow, FindsLossesThatDiffer) {
  auto row = some_row();
  EXPECT_EQ(row.wrong(), 0);
  row.samples[1].loss = 2.03;
  row.samples[4].loss = std::nan("");
  EXPECT_EQ(row.wrong(), 2);
}

TEST(BenchGpuTable, HasALineForEachSide) {
  const auto lines = gpu_lines(some_row());
  for (const char* line : {"  cnn +plain +10.00 +9.200 +11.60 +100.0 +2.0000\n", "  cnn +ddp +11.00 ",
                           "  cnn +captured +5.000 ", "  cnn +python graph +4.000 ", "  cnn +python plain +12.00 ",
                           "  cnn +python ddp +22.00 ", "  cnn +python best +16.50 "})
    EXPECT_THAT(lines, ContainsRegex(line));
  EXPECT_THAT(gpu_comparison({some_row()}), ContainsRegex("cnn +1.10x +2.00x +1.50x +1.20x +1.25x +1.00x\n"));
  EXPECT_THAT(gpu_header(), HasSubstr("peak"));
}

TEST(BenchCoprocess, AnswersLineByLine) {
  Coprocess coprocess("the echo",
                      {"/bin/sh", "-c", "echo ready; while read -r line; do echo \"you said $line\"; done"});
  EXPECT_EQ(coprocess.read_answer(), "ready");
  EXPECT_EQ(coprocess.request("this"), "you said this");
  EXPECT_EQ(coprocess.request("that and more"), "you said that and more");
}

TEST(BenchCoprocess, IsMissedWhenItHasEnded) {
  Coprocess coprocess("the short one", {"/bin/sh", "-c", "read -r line; exit 1"});
  expect_error<PeerError>([&] { coprocess.request("anything"); }, "the short one has ended");
  expect_error<SystemError>([] { Coprocess("nobody", {"/there/is/no/such/program"}); }, "/there/is/no/such/program");
}

}  // namespace
}  // namespace lockstep::bench
