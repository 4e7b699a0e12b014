#include "comm/watch/flight_recorder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/child_process.h"
#include "support/other_user.h"
#include "support/recording.h"
#include "support/stolen_time.h"
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
  EXPECT_EQ(records.front().call_id.number, 45);
  EXPECT_EQ(records.back().call_id.number, 300);
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
          {0, "world", {number, MessageRoute{1, 0, 0}}, {Operation::kRecv}, {"a.cpp", 1}, CallRecord::State::kPosted});
  const auto before = thread_cpu_time();
  for (int number = 1; number <= 20000; ++number)
    change(recorder, begin(recorder, {0, "world", {number}, {kBarrier}, {"b.cpp", 1}}), CallRecord::State::kDone);
  EXPECT_LT(thread_cpu_time() - before, std::chrono::milliseconds(500));
  EXPECT_EQ(recorder.records().size(), 20000 + FlightRecorder::kCalls);
}

TEST(FlightRecorder, DescribesCallsOfLockstepItselfWithoutPathsOfTheMachineThatBuiltIt) {
  EXPECT_EQ(describe(CallSite{"/home/me/train.cpp", 7}), "/home/me/train.cpp:7");
  EXPECT_EQ(describe(CallSite{"backward of DistributedDataParallel", 0}), "backward of DistributedDataParallel");
  const std::string tests = LOCKSTEP_TEST_SOURCE_DIR;
  const auto own = tests.substr(0, tests.rfind('/')) + "/src/comm/strings.cpp";
  EXPECT_EQ(describe(CallSite{own.c_str(), 56}), "comm/strings.cpp:56, inside lockstep");
}

TEST(FlightRecorder, SaysWhatTheRankIsDoing) {
  FlightRecorder recorder;
  EXPECT_THAT(recorder.doing(), HasSubstr("it has made no call yet"));
  auto outer = begin(recorder, {0, "world", {1}, {kBarrier}, {"a.cpp", 7}});
  EXPECT_THAT(recorder.doing(), HasSubstr("in barrier(), call 1 of group 'world' at a.cpp:7 for 0"));
  auto posted = begin(
      recorder, {0, "world", {1, MessageRoute{1, 0, 0}}, {Operation::kRecv}, {"a.cpp", 8}, CallRecord::State::kPosted});
  EXPECT_THAT(recorder.doing(), HasSubstr("in barrier()")) << "nobody waits for the message yet";
  change(recorder, posted, CallRecord::State::kRunning);
  EXPECT_THAT(recorder.doing(), HasSubstr("in recv()"));
  change(recorder, posted, CallRecord::State::kDone);
  change(recorder, outer, CallRecord::State::kDone);
  EXPECT_THAT(recorder.doing(), HasSubstr("outside of any call for 0"));
  EXPECT_THAT(recorder.doing(), HasSubstr("its last call was barrier()"));
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

/// The files of the flight recorder, where TMPDIR is a folder that all users write to.
class FlightFiles : public testing::Test {
 protected:
  FlightFiles() { ::setenv("TMPDIR", shared_.c_str(), 1); }
  ~FlightFiles() override {
    ::unsetenv("LOCKSTEP_FLIGHT_DIR");
    before_.empty() ? ::unsetenv("TMPDIR") : ::setenv("TMPDIR", before_.c_str(), 1);
  }

  static std::string dump_rank(int rank) { return dump(FlightRecorder(), rank, "a reason"); }

  static mode_t mode_of(const std::filesystem::path& path) {
    struct stat status {};
    EXPECT_EQ(::lstat(path.c_str(), &status), 0) << path;
    return status.st_mode & 07777;
  }

  static size_t files_in(const std::filesystem::path& folder) {
    return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
  }

  const std::string before_ = std::getenv("TMPDIR") ? std::getenv("TMPDIR") : "";
  TemporaryFolder folder_;
  const std::filesystem::path shared_ = make_shared_folder(folder_.path());
  const std::filesystem::path own_ = shared_ / ("lockstep-flight-" + std::to_string(::geteuid()));
};

TEST_F(FlightFiles, AreInAFolderOfThisUserAlone) {
  const mode_t mask = ::umask(0);
  const std::string path = dump_rank(3);
  ::umask(mask);
  EXPECT_EQ(path, own_ / ("lockstep-flight-" + std::to_string(::getpid()) + "-rank3.jsonl"));
  EXPECT_EQ(mode_of(own_), 0700u);
  EXPECT_EQ(mode_of(path), 0600u);
}

TEST_F(FlightFiles, OfOneProcessDoNotReplaceEachOther) {
  for (const char* named : {"", shared_.c_str()}) {
    ::setenv("LOCKSTEP_FLIGHT_DIR", named, 1);
    const std::string first = dump_rank(0), second = dump_rank(0);
    EXPECT_NE(first, second);
    for (const auto& path : {first, second}) {
      EXPECT_TRUE(std::filesystem::is_regular_file(path)) << path;
      EXPECT_THAT(path, testing::EndsWith("-rank0.jsonl"));
    }
  }
}

// A rank that fails must say so, whoever puts what under the name of its file.
TEST_F(FlightFiles, DoNotWaitForAPipeWithTheirName) {
  for (const char* named : {"", shared_.c_str()}) {
    ChildProcess rank([&](const ChildProcess::Parent& test) {
      test.read_line();
      ::setenv("LOCKSTEP_FLIGHT_DIR", named, 1);
      test.write_line(dump_rank(0));
      test.read_line();
    });
    const auto pipe = shared_ / ("lockstep-flight-" + std::to_string(rank.pid()) + "-rank0.jsonl");
    ASSERT_EQ(::mkfifo(pipe.c_str(), 0666), 0);
    rank.write_line("fail");
    const auto path = rank.read_line();
    EXPECT_TRUE(std::filesystem::is_regular_file(path)) << "'" << path << "'";
    EXPECT_TRUE(std::filesystem::is_fifo(pipe));
  }
}

TEST_F(FlightFiles, FollowNoLinkWithTheirName) {
  ::setenv("LOCKSTEP_FLIGHT_DIR", shared_.c_str(), 1);
  const auto target = folder_.path() / "target";
  std::ofstream(target) << "precious";
  const auto link = shared_ / ("lockstep-flight-" + std::to_string(::getpid()) + "-rank0.jsonl");
  std::filesystem::create_symlink(target, link);
  const std::string path = dump_rank(0);
  EXPECT_NE(path, link);
  EXPECT_TRUE(std::filesystem::is_regular_file(path)) << path;
  EXPECT_EQ(std::filesystem::file_size(target), 8u);
}

TEST_F(FlightFiles, AreNotWrittenWhereOthersCanReplaceThem) {
  auto expect_refused = [&](const std::string& why) {
    EXPECT_THAT(dump_rank(0), testing::AllOf(HasSubstr("could not be written"), HasSubstr(own_), HasSubstr(why),
                                             HasSubstr("LOCKSTEP_FLIGHT_DIR")));
  };
  ASSERT_EQ(::mkdir(own_.c_str(), 0700), 0);
  ASSERT_EQ(::chmod(own_.c_str(), 0777), 0);
  expect_refused("mode 0777");
  EXPECT_EQ(files_in(own_), 0u);
  std::filesystem::rename(own_, folder_.path() / "elsewhere");
  std::filesystem::create_directory_symlink(folder_.path() / "elsewhere", own_);
  expect_refused("is not a folder");
  std::filesystem::remove(own_);
  ASSERT_EQ(::mkfifo(own_.c_str(), 0666), 0);
  expect_refused("is not a folder");
  EXPECT_EQ(files_in(folder_.path() / "elsewhere"), 0u);
}

TEST_F(FlightFiles, AreNotWrittenIntoAFolderOfAnotherUser) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a folder away";
  ASSERT_EQ(::mkdir(own_.c_str(), 0700), 0);
  ASSERT_EQ(::chown(own_.c_str(), kOtherUser, kOtherUser), 0);
  EXPECT_THAT(dump_rank(0),
              testing::AllOf(HasSubstr("could not be written"), HasSubstr(own_),
                             HasSubstr("user " + std::to_string(kOtherUser)), HasSubstr("LOCKSTEP_FLIGHT_DIR")));
  EXPECT_EQ(files_in(own_), 0u);
}

TEST_F(FlightFiles, AreRemovedOldestFirstWhenTheyAreTooMany) {
  constexpr int kMaxRecent = 1024, kMaxOld = 64;  // as docs/failures.md says
  ASSERT_EQ(::mkdir(own_.c_str(), 0700), 0);
  auto file = [&](int number) { return own_ / ("lockstep-flight-" + std::to_string(number) + "-rank0.jsonl"); };
  auto make_files = [&](int count, time_t newest) {
    for (int number = 0; number < count; ++number) {
      std::ofstream(file(number)) << "{}";
      const timespec times[] = {{0, UTIME_OMIT}, {newest - count + number, 0}};
      ASSERT_EQ(::utimensat(AT_FDCWD, file(number).c_str(), times, 0), 0);
    }
  };
  std::ofstream(own_ / "notes") << "the user's";
  make_files(kMaxRecent + 5, std::time(nullptr));
  std::string path = dump_rank(0);
  EXPECT_TRUE(std::filesystem::exists(path)) << path;
  EXPECT_EQ(files_in(own_), kMaxRecent + 1u) << "and the notes";
  EXPECT_FALSE(std::filesystem::exists(file(5)));
  EXPECT_TRUE(std::filesystem::exists(file(6)));

  std::filesystem::remove(path);
  make_files(kMaxRecent + 5, std::time(nullptr) - 7200);
  path = dump_rank(0);
  EXPECT_TRUE(std::filesystem::exists(path)) << path;
  EXPECT_EQ(files_in(own_), kMaxOld + 1u) << "and the notes";
}

}  // namespace
}  // namespace lockstep::detail
