#include "comm/flight_recorder.h"

#include <cstdlib>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/recording.h"
#include "support/temporary_folder.h"

namespace lockstep::detail {
namespace {

using testing::HasSubstr;

constexpr auto kBarrier = Operation::kBarrier;

TEST(FlightRecorder, RemembersTheLast256CallsInOrder) {
  FlightRecorder recorder;
  for (int number = 1; number <= 300; ++number)
    change(recorder, begin(recorder, {0, "world", {number}, {kBarrier}, {"a.cpp", number}}), CallRecord::State::kDone);
  auto records = recorder.records();
  ASSERT_EQ(records.size(), FlightRecorder::kCalls);
  EXPECT_EQ(records.front().subject.number, 45);
  EXPECT_EQ(records.back().subject.number, 300);
  EXPECT_FALSE(recorder.find("world", "call 44"));
  EXPECT_EQ(recorder.find("world", "call 45")->site.line, 45);
  EXPECT_FALSE(recorder.find("another", "call 45"));
}

TEST(FlightRecorder, KeepsACallThatRunsWhileHundredsCome) {
  FlightRecorder recorder;
  auto stuck = begin(recorder, {0, "slow", {1}, {kBarrier}, {"a.cpp", 1}});
  for (int number = 1; number <= 600; ++number)
    change(recorder, begin(recorder, {0, "world", {number}, {kBarrier}, {"b.cpp", number}}), CallRecord::State::kDone);
  ASSERT_TRUE(recorder.find("slow", "call 1"));
  EXPECT_THAT(recorder.doing(), HasSubstr("in barrier(), call 1 of group 'slow'"));
  EXPECT_EQ(recorder.records().front().group, "slow");
  change(recorder, stuck, CallRecord::State::kDone);  // its place is another's now
  EXPECT_FALSE(recorder.find("slow", "call 1"));
  EXPECT_EQ(recorder.records().size(), FlightRecorder::kCalls);
  EXPECT_THAT(recorder.doing(), HasSubstr("outside of any call"));
}

// A rank may post thousands of receives: what each further call costs must not depend on how many are under way.
TEST(FlightRecorder, IsNotSlowedDownByMessagesUnderWay) {
  FlightRecorder recorder;
  for (int number = 1; number <= 20000; ++number)
    begin(recorder,
          {0, "world", {number, Route{1, 0, 0}}, {Operation::kRecv}, {"a.cpp", 1}, CallRecord::State::kPosted});
  const auto start = std::chrono::steady_clock::now();
  for (int number = 1; number <= 20000; ++number)
    change(recorder, begin(recorder, {0, "world", {number}, {kBarrier}, {"b.cpp", 1}}), CallRecord::State::kDone);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(500));
  EXPECT_EQ(recorder.records().size(), 20000 + FlightRecorder::kCalls);
}

TEST(FlightRecorder, SaysWhatTheRankIsDoing) {
  FlightRecorder recorder;
  EXPECT_THAT(recorder.doing(), HasSubstr("having made none yet"));
  auto outer = begin(recorder, {0, "world", {1}, {kBarrier}, {"a.cpp", 7}});
  EXPECT_THAT(recorder.doing(), HasSubstr("in barrier(), call 1 of group 'world' at a.cpp:7 for 0"));
  auto posted =
      begin(recorder, {0, "world", {1, Route{1, 0, 0}}, {Operation::kRecv}, {"a.cpp", 8}, CallRecord::State::kPosted});
  EXPECT_THAT(recorder.doing(), HasSubstr("in barrier()")) << "nobody waits for the message yet";
  change(recorder, posted, CallRecord::State::kRunning);
  EXPECT_THAT(recorder.doing(), HasSubstr("in recv()"));
  change(recorder, posted, CallRecord::State::kDone);
  change(recorder, outer, CallRecord::State::kDone);
  EXPECT_THAT(recorder.doing(), HasSubstr("outside of any call for 0"));
  EXPECT_THAT(recorder.doing(), HasSubstr("its last was barrier()"));
}

TEST(FlightRecorder, IsWrittenDownAsJson) {
  TemporaryFolder folder;
  ::setenv("LOCKSTEP_FLIGHT_DIR", folder.path().c_str(), 1);
  FlightRecorder recorder;
  change(recorder, begin(recorder, {0, "world", {1}, {kBarrier}, {"dir/a \"b\".cpp", 7}}), CallRecord::State::kDone);
  begin(recorder, {0, "world", {2}, {Operation::kAllReduce, c10::ScalarType::Float, 4, ReduceOp::kSum}, {"a.cpp", 8}});
  auto path = dump(recorder, 3, "a \"reason\"\n");
  ::unsetenv("LOCKSTEP_FLIGHT_DIR");
  EXPECT_THAT(path, testing::StartsWith(folder.path().string()));
  EXPECT_THAT(path, testing::EndsWith("-rank3.jsonl"));
  std::ifstream file(path);
  std::string header, first, second, rest;
  std::getline(file, header);
  std::getline(file, first);
  std::getline(file, second);
  EXPECT_FALSE(std::getline(file, rest));
  EXPECT_THAT(header, testing::AllOf(HasSubstr("\"rank\": 3"), HasSubstr("\"reason\": \"a \\\"reason\\\"\\u000a\"")));
  EXPECT_THAT(first, testing::AllOf(HasSubstr("\"call\": \"call 1\""), HasSubstr("\"state\": \"done\""),
                                    HasSubstr("\"site\": \"dir/a \\\"b\\\".cpp:7\"")));
  EXPECT_THAT(second, testing::AllOf(HasSubstr("\"what\": \"all_reduce(sum, Float[4])\""),
                                     HasSubstr("\"state\": \"running\""), HasSubstr("\"took_s\": null")));
}

TEST(FlightRecorder, SaysWhyItCouldNotBeWritten) {
  ::setenv("LOCKSTEP_FLIGHT_DIR", "/nowhere/at all", 1);
  auto said = dump(FlightRecorder(), 0, "");
  ::unsetenv("LOCKSTEP_FLIGHT_DIR");
  EXPECT_THAT(
      said, testing::AllOf(HasSubstr("could not be written"), HasSubstr("/nowhere/at all"), HasSubstr("No such file")));
}

}  // namespace
}  // namespace lockstep::detail
