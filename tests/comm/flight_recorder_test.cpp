#include "comm/flight_recorder.h"

#include <cstdlib>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/temporary_folder.h"

namespace lockstep::detail {
namespace {

using testing::HasSubstr;

TEST(FlightRecorder, RemembersTheLast256CallsInOrder) {
  FlightRecorder recorder;
  for (int number = 1; number <= 300; ++number)
    recorder.change(recorder.begin({0, "world", "call " + std::to_string(number), {"barrier"}, {"a.cpp", number}}),
                    CallRecord::State::kDone);
  auto records = recorder.records();
  ASSERT_EQ(records.size(), FlightRecorder::kCalls);
  EXPECT_EQ(records.front().subject, "call 45");
  EXPECT_EQ(records.back().subject, "call 300");
  EXPECT_FALSE(recorder.find("world", "call 44"));
  EXPECT_EQ(recorder.find("world", "call 45")->site.line, 45);
  EXPECT_FALSE(recorder.find("another", "call 45"));
}

TEST(FlightRecorder, KeepsACallThatRunsWhileHundredsCome) {
  FlightRecorder recorder;
  auto stuck = recorder.begin({0, "slow", "call 1", {"barrier"}, {"a.cpp", 1}});
  for (int number = 1; number <= 600; ++number)
    recorder.change(recorder.begin({0, "world", "call " + std::to_string(number), {"barrier"}, {"b.cpp", number}}),
                    CallRecord::State::kDone);
  ASSERT_TRUE(recorder.find("slow", "call 1"));
  EXPECT_THAT(recorder.doing(), HasSubstr("in barrier(), call 1 of group 'slow'"));
  EXPECT_EQ(recorder.records().front().group, "slow");
  recorder.change(stuck, CallRecord::State::kDone);  // its place is another's now
  EXPECT_FALSE(recorder.find("slow", "call 1"));
  EXPECT_EQ(recorder.records().size(), FlightRecorder::kCalls);
  EXPECT_THAT(recorder.doing(), HasSubstr("outside of any call"));
}

TEST(FlightRecorder, SaysWhatTheRankIsDoing) {
  FlightRecorder recorder;
  EXPECT_THAT(recorder.doing(), HasSubstr("having made none yet"));
  auto outer = recorder.begin({0, "world", "call 1", {"barrier"}, {"a.cpp", 7}});
  EXPECT_THAT(recorder.doing(), HasSubstr("in barrier(), call 1 of group 'world' at a.cpp:7 for 0"));
  auto posted = recorder.begin({0, "world", "message 1", {"recv"}, {"a.cpp", 8}, CallRecord::State::kPosted});
  EXPECT_THAT(recorder.doing(), HasSubstr("in barrier()")) << "nobody waits for the message yet";
  recorder.change(posted, CallRecord::State::kRunning);
  EXPECT_THAT(recorder.doing(), HasSubstr("in recv()"));
  recorder.change(posted, CallRecord::State::kDone);
  recorder.change(outer, CallRecord::State::kDone);
  EXPECT_THAT(recorder.doing(), HasSubstr("outside of any call for 0"));
  EXPECT_THAT(recorder.doing(), HasSubstr("its last was barrier()"));
}

TEST(FlightRecorder, IsWrittenDownAsJson) {
  TemporaryFolder folder;
  ::setenv("LOCKSTEP_FLIGHT_DIR", folder.path().c_str(), 1);
  FlightRecorder recorder;
  recorder.change(recorder.begin({0, "world", "call 1", {"barrier"}, {"dir/a \"b\".cpp", 7}}), CallRecord::State::kDone);
  recorder.begin({0, "world", "call 2", {"all_reduce", c10::ScalarType::Float, 4, ReduceOp::kSum}, {"a.cpp", 8}});
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
