#include <lockstep/stage.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <mutex>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/error.h>
#include <lockstep/logging.h>
#include <lockstep/process_group.h>
#include <lockstep/run_threads.h>

#include "data/staging.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::Not;

class Stage : public testing::Test {
 protected:
  void write(const std::string& name, const std::string& bytes) {
    fs::create_directories((shared_ / name).parent_path());
    std::ofstream(shared_ / name) << bytes;
    const timespec times[] = {{0, UTIME_OMIT}, {++clock_, 0}};  // each write is later than the last
    ASSERT_EQ(::utimensat(AT_FDCWD, (shared_ / name).c_str(), times, 0), 0);
  }

  std::string read(const fs::path& file) const {
    std::ifstream in(file);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  static ino_t inode_of(const fs::path& file) {
    struct stat status = {};
    return ::stat(file.c_str(), &status) == 0 ? status.st_ino : 0;
  }

  size_t files_in(const fs::path& folder) const {
    size_t count = 0;
    for (const auto& entry : fs::recursive_directory_iterator(folder)) count += entry.is_regular_file();
    return count;
  }

  // What each of three ranks returns or says.
  std::vector<std::string> stage_on_all(const fs::path& source, const fs::path& folder) const {
    std::vector<std::string> said(3);
    run_threads(3, [&](ProcessGroup world) {
      auto& mine = said[static_cast<size_t>(world.rank())];
      try {
        mine = stage(world, source, folder).string();
      } catch (const SystemError& error) {
        mine = error.what();
      }
    });
    return said;
  }

  time_t clock_ = 1'000'000'000;
  TemporaryFolder temporary_;
  const fs::path shared_ = temporary_.path() / "shared", local_ = temporary_.path() / "local" / "of" / "host";
};

TEST_F(Stage, CopiesAFileOnceForAllRanks) {
  write("train.lmdb", std::string(10 << 20, 'x'));
  const auto copy = local_ / "train.lmdb";
  int copies = 0;
  const auto level = log_level();
  set_log_level(LogLevel::kInfo);
  set_log_sink([&](LogLevel, const std::string& line) { copies += line.starts_with("staging"); });
  EXPECT_THAT(stage_on_all(shared_ / "train.lmdb", local_), Each(copy.string()));
  EXPECT_TRUE(read(copy) == std::string(10 << 20, 'x'));
  EXPECT_EQ(files_in(local_), 1u);
  EXPECT_EQ(copies, 1);
  set_log_sink({});
  set_log_level(level);

  const auto inode = inode_of(copy);
  stage_on_all(shared_ / "train.lmdb", local_);
  EXPECT_EQ(inode_of(copy), inode) << "copied again";
  write("train.lmdb", std::string(10 << 20, 'y'));  // as long, but later
  stage_on_all(shared_ / "train.lmdb", local_);
  EXPECT_TRUE(read(copy) == std::string(10 << 20, 'y'));
}

TEST_F(Stage, CopiesAFolderAndLeavesWhatElseIsThere) {
  write("set/a", "1");
  write("set/deep/er/b", "22");
  write("set/empty", "");
  fs::create_directories(local_ / "set");
  std::ofstream(local_ / "set" / "mine") << "3";
  EXPECT_THAT(stage_on_all(shared_ / "set/", local_), Each((local_ / "set").string()));
  EXPECT_EQ(read(local_ / "set" / "a") + read(local_ / "set" / "deep" / "er" / "b"), "122");
  EXPECT_TRUE(fs::exists(local_ / "set" / "empty"));
  EXPECT_EQ(read(local_ / "set" / "mine"), "3");
  EXPECT_EQ(files_in(local_), 4u);
}

TEST_F(Stage, CopiesForRanksThatDoNotSeeTheSameDisk) {
  write("a", "bytes");
  run_threads(3, [&](ProcessGroup world) {
    const auto mine = temporary_.path() / ("container_" + std::to_string(world.rank()));
    EXPECT_EQ(read(stage(world, shared_ / "a", mine)), "bytes");
  });
}

TEST_F(Stage, FailsOnAllRanksWhereOneFails) {
  EXPECT_THAT(stage_on_all(shared_ / "nothing", local_),
              Each(AllOf(HasSubstr("stage: rank 0: "), HasSubstr("nothing\" cannot be read: No such file"),
                         Not(HasSubstr("rank 1")))));
  write("file", "bytes");
  EXPECT_THAT(stage_on_all(shared_ / "file", shared_ / "file"),
              Each(HasSubstr("file\" cannot be created: File exists")));
  ASSERT_EQ(::symlink(shared_.c_str(), (shared_ / "loop").c_str()), 0);
  EXPECT_THAT(stage_on_all(shared_, temporary_.path() / "new"),
              Each(HasSubstr("loop\" is a link to a folder that contains it")));
  EXPECT_FALSE(fs::exists(temporary_.path() / "new")) << "something was made before all was looked at";
}

TEST_F(Stage, CopiesAPieceAtATimeAndShowsWhatIsWhole) {
  write("a", std::string(9 << 20, 'a'));
  Staging staging(shared_ / "a", local_ / "a");
  EXPECT_EQ(staging.missing_bytes(), uint64_t{9} << 20);
  int turns = 0;
  for (; !staging.is_done(); ++turns) {
    EXPECT_FALSE(fs::exists(local_ / "a"));
    staging.run_for(0ms);
  }
  EXPECT_EQ(turns, 4) << "three pieces, and the end";
  EXPECT_TRUE(read(local_ / "a") == std::string(9 << 20, 'a'));
}

TEST_F(Stage, LeavesNoHalf) {
  write("a", std::string(9 << 20, 'a'));
  {
    Staging staging(shared_ / "a", local_ / "a");
    staging.run_for(0ms);
    EXPECT_EQ(files_in(local_), 1u);
  }
  EXPECT_EQ(files_in(local_), 0u);

  std::ofstream(local_ / "a.partial") << std::string(20 << 20, 'z');  // as a job that was killed leaves it
  Staging over(shared_ / "a", local_ / "a");
  over.run_for(1h);
  EXPECT_TRUE(read(local_ / "a") == std::string(9 << 20, 'a'));
  EXPECT_EQ(files_in(local_), 1u);
  ::unlink((local_ / "a").c_str());

  Staging staging(shared_ / "a", local_ / "a"), another(shared_ / "a", local_ / "a");
  staging.run_for(0ms);
  another.run_for(1h);  // while the first is at it
  EXPECT_TRUE(read(local_ / "a") == std::string(9 << 20, 'a'));
  ::unlink((local_ / "a").c_str());
  write("a", std::string(9 << 20, 'b'));
  EXPECT_THROW(staging.run_for(1h), SystemError);
  EXPECT_FALSE(fs::exists(local_ / "a"));
}

// The folder may be one that other users write to, and they know the name of the file that is not whole yet.
TEST_F(Stage, WritesToNothingThatAnotherUserPutThere) {
  write("a", "bytes");
  fs::create_directories(local_);
  const auto partial = local_ / "a.partial", target = temporary_.path() / "target";
  const auto expect_staged_beside_it = [&] {
    Staging(shared_ / "a", local_ / "a").run_for(1h);
    EXPECT_EQ(read(local_ / "a"), "bytes");
    EXPECT_TRUE(fs::exists(fs::symlink_status(partial))) << "removed";
    fs::remove(local_ / "a");
    fs::remove(partial);
  };
  std::ofstream(target) << "precious";
  fs::create_symlink(target, partial);
  expect_staged_beside_it();
  EXPECT_EQ(read(target), "precious");
  ASSERT_EQ(::mkfifo(partial.c_str(), 0666), 0);
  expect_staged_beside_it();
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
  std::ofstream(partial) << "another's";
  ASSERT_EQ(::chown(partial.c_str(), 54321, static_cast<gid_t>(-1)), 0);
  expect_staged_beside_it();
}

}  // namespace
}  // namespace lockstep
