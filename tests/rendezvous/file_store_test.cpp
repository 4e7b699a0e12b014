// The store in a file: what it does with files that others left or put there, and with ranks that die.

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>

#include <lockstep/error.h>
#include <lockstep/store.h>

#include "support/child_process.h"
#include "support/messages.h"
#include "support/other_user.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

class FileStores : public testing::Test {
 protected:
  static std::string content_of(const std::string& file) {
    std::ifstream in(file, std::ios::binary);
    return (std::ostringstream() << in.rdbuf()).str();
  }

  static void write(const std::string& file, const std::string& content, mode_t mode) {
    std::ofstream(file, std::ios::binary) << content;
    ASSERT_EQ(::chmod(file.c_str(), mode), 0);
  }

  /// Opens the store, sets a key, says "open", and lives until it is killed or its input ends.
  static void hold_store(const std::string& file, const ChildProcess::Parent& test) {
    auto store = open_file_store(file);
    store->set("key", "value");
    test.write_line("open");
    test.read_line();
  }

  TemporaryFolder folder_;
  const std::string file_ = folder_.path() / "store";
};

TEST_F(FileStores, AreRemovedByTheLastToCloseThem) {
  auto one = open_file_store(file_);
  auto two = open_file_store(file_);
  one.reset();
  EXPECT_TRUE(fs::exists(file_));
  two.reset();
  EXPECT_TRUE(fs::is_empty(folder_.path()));
}

TEST_F(FileStores, AreForTheirOwnerOnly) {
  const mode_t before = ::umask(0);
  auto store = open_file_store(file_);
  ::umask(before);
  EXPECT_EQ(fs::status(file_).permissions(), fs::perms::owner_read | fs::perms::owner_write);
}

TEST_F(FileStores, ForgetARecordThatADyingProcessLeftUnfinished) {
  auto store = open_file_store(file_);
  const auto before = fs::file_size(file_);
  store->set("unfinished", "a value that will be cut");
  const auto record = content_of(file_).substr(before);
  for (size_t bytes = 1; bytes < record.size(); ++bytes) {
    const std::string another = folder_.path() / "another";
    auto survivor = open_file_store(another);
    survivor->set("before", "1");
    std::ofstream(another, std::ios::binary | std::ios::app) << record.substr(0, bytes);
    EXPECT_FALSE(survivor->check({"unfinished"})) << bytes;
    auto later = open_file_store(another);
    EXPECT_TRUE(later->check({"before"})) << bytes;
    later->set("after", "2");
    EXPECT_EQ(survivor->get("after", 1s), "2") << bytes;
  }
}

TEST_F(FileStores, ForgetAChangeOfSeveralKeysThatADyingProcessLeftUnfinished) {
  auto store = open_file_store(file_);
  const auto before = fs::file_size(file_);
  store->multi_set({{"a", "one"}, {"b", "two"}, {"before", "changed"}});
  const auto change = content_of(file_).substr(before);
  for (size_t bytes = 1; bytes <= change.size(); ++bytes) {
    const bool is_whole = bytes == change.size();
    const std::string another = folder_.path() / "another";
    auto survivor = open_file_store(another);
    survivor->set("before", "1");
    std::ofstream(another, std::ios::binary | std::ios::app) << change.substr(0, bytes);
    EXPECT_EQ(survivor->check({"a"}), is_whole) << bytes;
    EXPECT_EQ(survivor->check({"b"}), is_whole) << bytes;
    auto later = open_file_store(another);
    EXPECT_EQ(later->get("before", 1s), is_whole ? "changed" : "1") << bytes;
    EXPECT_EQ(later->check({"a"}), is_whole) << bytes;
    later->append("before", "2");
    EXPECT_EQ(survivor->get("before", 1s), is_whole ? "changed2" : "12") << bytes;
  }
}

TEST_F(FileStores, GrowOnlyByWhatIsAppended) {
  auto store = open_file_store(file_);
  store->set("log", std::string(100'000, 'x'));
  const auto before = fs::file_size(file_);
  store->append("log", "y");
  EXPECT_LT(fs::file_size(file_) - before, 100u);
}

TEST_F(FileStores, SayWhichFileTheyCannotCreate) {
  expect_error<SystemError>([] { open_file_store("/nonexistent/folder/store"); }, "create", "/nonexistent/folder/store",
                            "No such file");
}

TEST_F(FileStores, OpenTheSameFileWhenManyProcessesStartAtOnce) {
  constexpr int kProcesses = 8;
  std::vector<std::unique_ptr<ChildProcess>> ranks;
  for (int rank = 0; rank < kProcesses; ++rank)
    ranks.push_back(std::make_unique<ChildProcess>([&](const ChildProcess::Parent& test) {
      test.read_line();
      auto store = open_file_store(file_);
      store->add("ranks", 1);
      for (;;)
        if (store->get("ranks", 20s) == std::to_string(kProcesses)) break;
      test.write_line("met");
      test.read_line();
    }));
  for (auto& rank : ranks) rank->write_line("start");
  for (auto& rank : ranks) EXPECT_EQ(rank->read_line(), "met");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_.path()), {}), 1) << "something beside the store was left";
  for (auto& rank : ranks) rank->end_input();
  for (auto& rank : ranks) EXPECT_EQ(rank->wait(), 0);
  EXPECT_TRUE(fs::is_empty(folder_.path())) << "the last of those that close it at once removes it";
}

// The last to leave removes the file while others come: they must neither take it for a dead job's nor lose it.
TEST_F(FileStores, CanBeOpenedWhileOthersLeave) {
  std::vector<std::unique_ptr<ChildProcess>> ranks;
  for (int rank = 0; rank < 4; ++rank)
    ranks.push_back(std::make_unique<ChildProcess>([&](const ChildProcess::Parent& test) {
      test.read_line();
      for (int round = 0; round < 100; ++round) open_file_store(file_)->add("opened", 1);
    }));
  for (auto& rank : ranks) rank->write_line("start");
  for (auto& rank : ranks) {
    EXPECT_EQ(rank->wait(), 0) << rank->read_line();
  }
  EXPECT_TRUE(fs::is_empty(folder_.path()));
}

// --- what a dead job left

TEST_F(FileStores, NameAFileOfADeadJobAtOnce) {
  ChildProcess dying([&](const auto& test) { hold_store(file_, test); });
  ASSERT_EQ(dying.read_line(), "open");
  dying.kill(SIGKILL);
  dying.wait();
  const auto left = content_of(file_);
  for ([[maybe_unused]] int attempt : {1, 2})
    expect_error<UsageError>([&] { open_file_store(file_); }, file_ + " was left behind",
                             "pid " + std::to_string(dying.pid()), "rm " + file_);
  EXPECT_EQ(content_of(file_), left);
  fs::remove(file_);
  EXPECT_FALSE(open_file_store(file_)->check({"key"}));
}

TEST_F(FileStores, GoOnWhenOneOfSeveralRanksDies) {
  ChildProcess dying([&](const auto& test) { hold_store(file_, test); });
  ASSERT_EQ(dying.read_line(), "open");
  auto survivor = open_file_store(file_);
  dying.kill(SIGKILL);
  dying.wait();
  auto later = open_file_store(file_);
  EXPECT_EQ(later->get("key", 1s), "value");
  survivor.reset();
  EXPECT_TRUE(fs::exists(file_));
  later.reset();
  EXPECT_FALSE(fs::exists(file_)) << "the last that lives removes it";
}

// --- what is no store

TEST_F(FileStores, LeaveFilesOfOtherProgramsAlone) {
  for (const mode_t mode : {0600, 0644})
    for (const std::string content : {"epoch,loss\n1,0.5\n", "x", ""}) {
      write(file_, content, mode);
      expect_error<UsageError>([&] { open_file_store(file_); }, file_, "not a store", "does not exist yet");
      ASSERT_TRUE(fs::exists(file_));
      EXPECT_EQ(content_of(file_), content);
    }
}

TEST_F(FileStores, LeaveAFileThatHasTakenTheirNameAlone) {
  auto store = open_file_store(file_);
  fs::rename(file_, file_ + ".moved");
  write(file_, "another's", 0600);
  store.reset();
  EXPECT_EQ(content_of(file_), "another's");
}

TEST_F(FileStores, RefuseAFileThatOthersCanUse) {
  auto store = open_file_store(file_);
  for (const mode_t mode : {0640, 0604, 0666}) {
    ASSERT_EQ(::chmod(file_.c_str(), mode), 0);
    expect_error<UsageError>([&] { open_file_store(file_); }, file_, "not a store",
                             "mode 0" + (std::ostringstream() << std::oct << mode).str(), "0600");
  }
}

TEST_F(FileStores, FollowNoLinks) {
  const std::string target = folder_.path() / "target";
  fs::create_symlink(target, file_);
  expect_error<UsageError>([&] { open_file_store(file_); }, file_, "not a regular file");
  EXPECT_FALSE(fs::exists(target));
  auto store = open_file_store(target);
  expect_error<UsageError>([&] { open_file_store(file_); }, file_, "not a regular file");
  EXPECT_TRUE(fs::is_symlink(file_));
}

TEST_F(FileStores, NeitherWaitForPipesNorRemoveThem) {
  ASSERT_EQ(::mkfifo(file_.c_str(), 0600), 0);
  expect_error<UsageError>([&] { open_file_store(file_); }, file_, "not a regular file");
  EXPECT_TRUE(fs::is_fifo(file_));
}

TEST_F(FileStores, LeaveDevicesAlone) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make a device";
  ASSERT_EQ(::mknod(file_.c_str(), S_IFCHR | 0600, makedev(1, 5)), 0);  // another /dev/zero
  expect_error<UsageError>([&] { open_file_store(file_); }, file_, "not a regular file");
  EXPECT_TRUE(fs::is_character_file(file_));
}

// --- another user, in a folder that all may write

TEST_F(FileStores, KeepTheirContentFromAUserWhoCreatedTheFileFirst) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can act as another user";
  const std::string shared = make_shared_folder(folder_.path()) / "store";
  ChildProcess other([&](const ChildProcess::Parent& test) {
    become_other_user();
    ::umask(0);
    const int file = ::open(shared.c_str(), O_RDWR | O_CREAT | O_EXCL, 0666);
    test.write_line(file < 0 ? "failed" : "created");
    test.read_line();
    char bytes[64] = {};
    const auto got = ::pread(file, bytes, sizeof bytes - 1, 0);
    test.write_line("read " + std::to_string(got));
    test.read_line();
  });
  ASSERT_EQ(other.read_line(), "created");
  expect_error<UsageError>([&] { open_file_store(shared)->set("job_store", "the secret"); }, shared,
                           "user " + std::to_string(kOtherUser), "only you can write");
  other.write_line("look");
  EXPECT_EQ(other.read_line(), "read 0");
  EXPECT_TRUE(fs::exists(shared)) << "another user's file was removed";
}

TEST_F(FileStores, AreNotOpenedAsAnotherUser) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can act as another user";
  const std::string shared = make_shared_folder(folder_.path()) / "store";
  auto store = open_file_store(shared);
  ChildProcess other([&](const ChildProcess::Parent& test) {
    become_other_user();
    test.write_line(error_of<UsageError>([&] { open_file_store(shared); }));
  });
  EXPECT_THAT(other.read_line(), testing::AllOf(testing::HasSubstr(shared), testing::HasSubstr("user 0")));
}

}  // namespace
}  // namespace lockstep
