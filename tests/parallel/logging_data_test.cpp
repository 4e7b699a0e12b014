#include "parallel/ddp/logging_data.h"

#include <fstream>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/run_threads.h>

#include "parallel/gradients.h"
#include "parallel/models.h"
#include "support/messages.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using testing::HasSubstr;

Moment at(double ms) {
  return {std::chrono::steady_clock::time_point() + std::chrono::microseconds(static_cast<int64_t>(ms * 1000))};
}

/// Backward from 100 to 110 ms, computing until 108; two reductions of 3 ms each, of which 4 ms are hidden.
StepTimes example() {
  StepTimes step{.number = 7,
                 .forward_begin = at(90),
                 .forward_end = at(95),
                 .backward_begin = at(100),
                 .computed = at(108),
                 .backward_end = at(110)};
  step.buckets = {{1 << 20, 2, at(103), at(103), at(106)}, {25 << 20, 3, at(107), at(107), at(110)}};
  return step;
}

TEST(LoggingData, SaysHowMuchOfTheReductionsIsHidden) {
  DdpLoggingData data;
  describe_step(example(), data);
  EXPECT_EQ(data.measured_step, 7);
  EXPECT_DOUBLE_EQ(data.forward_ms, 5);
  EXPECT_DOUBLE_EQ(data.backward_ms, 10);
  EXPECT_DOUBLE_EQ(data.exposed_ms, 2);
  EXPECT_DOUBLE_EQ(data.reduction_ms, 6);
  EXPECT_NEAR(data.overlap, 4.0 / 6, 1e-9);
  ASSERT_EQ(data.buckets.size(), 2u);
  EXPECT_DOUBLE_EQ(data.buckets[1].full_ms, 7);
  EXPECT_DOUBLE_EQ(data.buckets[1].reduced_ms, 10);
  EXPECT_EQ(data.buckets[0].gradients, 2u);
}

TEST(LoggingData, ReductionsUnderWayAtTheSameTimeCountOnce) {
  auto step = example();
  step.buckets[1].started = at(104);
  step.buckets[1].reduced = at(105);
  DdpLoggingData data;
  describe_step(step, data);
  EXPECT_DOUBLE_EQ(data.reduction_ms, 3);
  EXPECT_DOUBLE_EQ(data.overlap, 1);
}

TEST(LoggingData, ATraceIsWhatPerfettoReads) {
  auto trace =
      nlohmann::json::parse(trace_file({trace_events(0, {example()}), trace_events(1, {example(), example()})}));
  std::map<std::string, int> count;
  for (const auto& event : trace.at("traceEvents")) {
    ++count[event.at("name").get<std::string>()];
    if (event.at("ph") == "X") {
      EXPECT_GE(event.at("ts").get<double>(), 90000);
      EXPECT_GE(event.at("dur").get<double>(), 0);
      EXPECT_LE(event.at("ts").get<double>() + event.at("dur").get<double>(), 110000.001);
    }
  }
  EXPECT_EQ(count["forward 7"], 3);
  EXPECT_EQ(count["backward 7"], 3);
  EXPECT_EQ(count["wait"], 3);
  EXPECT_EQ(count["bucket 1, 25.0 MiB"], 3);
  EXPECT_EQ(count["process_name"], 2);
}

TEST(LoggingData, IsThatOfRealSteps) {
  TemporaryFolder folder;
  const auto path = (folder.path() / "trace.json").string();
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world, {.buckets = {.first_bytes = 100, .cap_bytes = 300}});
    EXPECT_EQ(ddp.logging_data().steps, 0);
    EXPECT_THAT(ddp.logging_data().to_table(), HasSubstr("0 steps"));
    for (int step = 0; step < 70; ++step) ddp(input_of(world.rank())).sum().backward();
    auto data = ddp.logging_data();
    EXPECT_EQ(data.steps, 70);
    EXPECT_EQ(data.measured_step, 70);
    EXPECT_EQ(data.rank, world.rank());
    EXPECT_EQ(data.world_size, 2);
    EXPECT_EQ(data.parameters, 6u);
    EXPECT_EQ(data.bytes, 4 * (6 * 16 + 16 + 16 * 12 + 12 + 12 * 4 + 4));
    EXPECT_EQ(data.buckets.size(), ddp.bucket_plan().buckets.size());
    EXPECT_GT(data.forward_ms, 0);
    EXPECT_GT(data.backward_ms, data.exposed_ms);
    for (const auto& bucket : data.buckets) {
      EXPECT_LE(bucket.full_ms, bucket.started_ms);
      EXPECT_LE(bucket.started_ms, bucket.reduced_ms);
      EXPECT_LE(bucket.reduced_ms, data.backward_ms);
    }
    EXPECT_THAT(data.to_table(), HasSubstr("rank " + std::to_string(world.rank()) + " of 2 over threads"));
    EXPECT_THAT(data.to_table(), HasSubstr("done ms"));
    EXPECT_THAT(ddp.to_string(), HasSubstr("6 parameters, 1472 bytes in"));
    ddp.write_trace(path);
    if (world.rank() == 0)
      expect_error<SystemError>([&] { ddp.write_trace((folder.path() / "no" / "such").string()); }, "No such file");
    else
      ddp.write_trace(path);
  });
  std::ifstream file(path);
  auto trace = nlohmann::json::parse(file);
  int backwards = 0;
  for (const auto& event : trace.at("traceEvents"))
    backwards += event.at("name").get<std::string>().starts_with("backward");
  EXPECT_EQ(backwards, 2 * 64) << "the last 64 steps of both ranks";
}

}  // namespace
}  // namespace lockstep
