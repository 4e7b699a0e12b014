#include "report/event_file.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/error.h>
#include <lockstep/tensorboard_writer.h>

#include "report/event_records.h"
#include "support/child_process.h"
#include "support/forked.h"
#include "support/log_lines.h"
#include "support/messages.h"
#include "support/temporary_folder.h"

// Event files, without TensorBoard: tensorboard_test.cpp lets TensorBoard read them.

namespace lockstep::event_files {
namespace {

std::vector<std::string> in_folder(const TemporaryFolder& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

// --- records

TEST(EventFile, HasTheChecksumsThatArePublished) {
  EXPECT_EQ(detail::crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(detail::crc32c(""), 0u);
  EXPECT_EQ(detail::crc32c(std::string(32, '\0')), 0x8a9136aau);  // RFC 3720, B.4
  EXPECT_EQ(detail::crc32c(std::string(32, '\xff')), 0x62a8ab43u);
}

// The first record of TensorFlow's own files: TensorBoard's sources have its bytes.
TEST(EventFile, FramesAMessageAsTensorFlowDoes) {
  using namespace std::string_literals;
  const auto message = "\x09\x00\x00\x80\x38\x99\xd6\xd7\x41\x1a\x0d"s + "brain.Event:2";
  EXPECT_EQ(detail::to_record(message),
            "\x18\x00\x00\x00\x00\x00\x00\x00\xa3\x7f\x4b\x22"s + message + "\x12\x4b\x36\xab"s);
  EXPECT_EQ(detail::ProtoMessage()
                .add_double(1, std::bit_cast<double>(0x41d7d69938800000))
                .add_bytes(3, "brain.Event:2")
                .bytes(),
            message);
}

TEST(EventFile, WritesNegativeAndLargeIntegersAsProtocolBuffersDo) {
  using namespace std::string_literals;
  EXPECT_EQ(detail::ProtoMessage().add_int(2, 300).bytes(), "\x10\xac\x02"s);  // of protobuf's documentation: 150, 300
  EXPECT_EQ(detail::ProtoMessage().add_int(2, -1).bytes(), "\x10"s + std::string(9, '\xff') + "\x01");
  EXPECT_EQ(Fields(detail::ProtoMessage().add_int(200, int64_t{1} << 62).bytes()).numbers.at(200), uint64_t{1} << 62);
}

// --- the file

TEST(TensorBoardWriter, MakesTheFolderAndARecordForEachCall) {
  const TemporaryFolder folder;
  const auto runs = (folder.path() / "runs/a/").string();
  TensorBoardWriter writer(runs, {.suffix = ".train"});
  EXPECT_TRUE(writer.path().starts_with(runs + "/events.out.tfevents.")) << writer.path();
  EXPECT_TRUE(writer.path().ends_with(".train"));
  EXPECT_EQ(Fields(records_in(writer.path()).at(0)).texts.at(3), "brain.Event:2");
  writer.scalar("a", 1, 7);
  EXPECT_EQ(scalars_in(writer.path()), (std::vector<std::string>{"a@7"})) << "while the writer is in use";
  writer.scalar("b", 2, 8);
  writer.flush();
  EXPECT_EQ(scalars_in(writer.path()), (std::vector<std::string>{"a@7", "b@8"}));
}

TEST(TensorBoardWriter, NamesItsFileAfterAllOthersInTheFolder) {
  const TemporaryFolder folder;
  const auto now = std::time(nullptr);
  // Another host's clock is ahead, and its name sorts last.
  const auto later = "events.out.tfevents." + std::to_string(now + 1000) + ".zzz.9";
  for (const auto& name :
       {later, std::string("events.out.tfevents.x"), std::string("events.out.tfevents.99999999999.y")})
    std::ofstream(folder.path() / name) << "";
  std::vector<std::string> names{later};
  for (int i = 0; i < 12; ++i)
    names.push_back(std::filesystem::path(TensorBoardWriter(folder.path()).path()).filename());
  EXPECT_TRUE(std::is_sorted(names.begin(), names.end())) << testing::PrintToString(names);
  EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), 13u);
}

TEST(TensorBoardWriter, RefusesAFolderThatItCannotWriteTo) {
  const TemporaryFolder folder;
  std::ofstream(folder.path() / "file") << "no folder";
  expect_error<SystemError>([&] { TensorBoardWriter((folder.path() / "file").string()); }, "file", "Not a directory");
  expect_error<SystemError>([&] { TensorBoardWriter((folder.path() / "file/below").string()); }, "mkdir", "file/below");
  expect_error<SystemError>([&] { TensorBoardWriter("/proc/lockstep"); }, "mkdir /proc/lockstep", "can write to");
}

TEST(TensorBoardWriter, RefusesInvalidArgumentsAndWritesNothing) {
  const TemporaryFolder folder;
  expect_error<UsageError>([&] { TensorBoardWriter(folder.path(), {.first_step = -1}); }, "first_step", "-1");
  expect_error<UsageError>([&] { TensorBoardWriter(folder.path(), {.suffix = "a/b"}); }, "suffix", "a/b");
  EXPECT_EQ(in_folder(folder).size(), 0u);
  TensorBoardWriter writer(folder.path());
  const auto before = file_bytes(writer.path());
  const auto values = torch::ones({3});
  for (const char* tag : {"\xff", "a\xc0\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xe2\x82"}) {
    expect_error<UsageError>([&] { writer.scalar(tag, 1, 0); }, "\xef\xbf\xbd", "UTF-8");
    expect_error<UsageError>([&] { writer.histogram(tag, values, 0); }, "UTF-8");
    expect_error<UsageError>([&] { writer.text(tag, "", 0); }, "UTF-8");
    expect_error<UsageError>([&] { writer.image(tag, torch::ones({2, 2}), 0); }, "UTF-8");
  }
  expect_error<UsageError>([&] { writer.scalar("", 1, 0); }, "tag is empty");
  expect_error<UsageError>([&] { writer.histogram("h", {}, 0); }, "undefined");
  expect_error<UsageError>([&] { writer.histogram("h", values.to(torch::kComplexFloat), 0); }, "complex", "abs()");
  expect_error<UsageError>([&] { writer.histogram("h", values.to_sparse(), 0); }, "sparse", "to_dense()");
  expect_error<UsageError>([&] { writer.histogram("h", torch::quantize_per_tensor(values, 1, 0, torch::kQInt8), 0); },
                           "quantized", "dequantize()");
  expect_error<UsageError>([&] { writer.text("t", std::string((64 << 20) + 1, 'a'), 0); }, "67108865", "67108864");
  expect_error<UsageError>([&] { writer.image("i", torch::ones({5}), 0); }, "[5]");
  EXPECT_EQ(file_bytes(writer.path()), before);
}

TEST(TensorBoardWriter, ManyThreadsWriteWholeRecords) {
  const TemporaryFolder folder;
  TensorBoardWriter writer(folder.path());
  constexpr int kThreads = 4, kRecords = 200;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      const auto tag = "thread" + std::to_string(t) + std::string(100 * t, 'x');
      for (int step = 0; step < kRecords; ++step) writer.scalar(tag, step, step);
    });
  for (auto& thread : threads) thread.join();
  std::map<std::string, int64_t> next;
  for (const auto& found : scalars_in(writer.path())) {
    const auto at = found.find('@');
    EXPECT_EQ(std::stoll(found.substr(at + 1)), next[found.substr(0, at)]++) << found;
  }
  EXPECT_EQ(next.size(), static_cast<size_t>(kThreads));
  for (const auto& [tag, records] : next) EXPECT_EQ(records, kRecords) << tag;
}

TEST(TensorBoardWriter, AKilledProcessLosesNothing) {
  const TemporaryFolder folder;
  ChildProcess child([&](const ChildProcess::Parent& parent) {
    TensorBoardWriter writer(folder.path());
    for (int step = 0; step < 100; ++step) writer.scalar("loss", step, step);
    parent.write_line("written");
    parent.read_line();
  });
  ASSERT_EQ(child.read_line(), "written");
  child.kill(SIGKILL);
  EXPECT_EQ(WTERMSIG(child.wait()), SIGKILL);
  EXPECT_EQ(scalars_in(folder.path() / in_folder(folder).at(0)).size(), 100u);
}

TEST(TensorBoardWriter, AForkedChildMayNotUseIt) {
  const TemporaryFolder folder;
  TensorBoardWriter writer(folder.path());
  writer.scalar("loss", 1, 1);
  EXPECT_EQ(exit_code_of_fork([&] {
              try {
                writer.scalar("loss", 2, 2);
              } catch (const UsageError&) {
                ::_exit(33);
              }
            }),
            33);
  EXPECT_EQ(scalars_in(writer.path()), (std::vector<std::string>{"loss@1"}));
}

/// Limits the size of files that this process writes: beyond it, writing fails as on a full disk.
void limit_files_to(rlim_t bytes) {
  struct sigaction ignored = {};
  ignored.sa_handler = SIG_IGN;
  ::sigaction(SIGXFSZ, &ignored, nullptr);
  rlimit limit{};
  ::getrlimit(RLIMIT_FSIZE, &limit);
  limit.rlim_cur = bytes;
  if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) throw std::runtime_error("setrlimit");
}

// For each position inside of a record at which the disk may be full: later records are readable.
TEST(TensorBoardWriter, AFullDiskLosesRecordsOnlyAsLongAsItIsFull) {
  for (const int extra : {0, 1, 9, 15, 30}) {
    const TemporaryFolder folder;
    ChildProcess child([&](const ChildProcess::Parent& parent) {
      LogLines log;
      {
        TensorBoardWriter writer(folder.path());
        writer.scalar("before", 1, 1);
        struct stat status = {};
        ::stat(writer.path().c_str(), &status);
        limit_files_to(static_cast<rlim_t>(status.st_size + extra));
        for (int step = 2; step < 5; ++step) writer.scalar("full", 1, step);
        writer.flush();
        limit_files_to(RLIM_INFINITY);
        writer.scalar("after", 1, 5);
      }
      for (const auto& line : log.lines()) parent.write_line(line);
      parent.write_line("end");
    });
    std::vector<std::string> lines;
    while (lines.empty() || (lines.back() != "end" && !lines.back().empty())) lines.push_back(child.read_line());
    ASSERT_EQ(lines.size(), 3u) << testing::PrintToString(lines);
    EXPECT_THAT(lines[0], testing::AllOf(testing::HasSubstr("File too large"), testing::HasSubstr("training continues"),
                                         testing::HasSubstr("events.out")));
    // A record of which the disk has a part is completed later.
    EXPECT_THAT(lines[1], testing::HasSubstr(extra == 0 ? ": 3 records" : ": 2 records"));
    const auto found = scalars_in(folder.path() / in_folder(folder).at(0));
    EXPECT_EQ(found, extra == 0 ? (std::vector<std::string>{"before@1", "after@5"})
                                : (std::vector<std::string>{"before@1", "full@2", "after@5"}));
  }
}

}  // namespace
}  // namespace lockstep::event_files
