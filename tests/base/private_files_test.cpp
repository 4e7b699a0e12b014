#include "base/private_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/error.h>

#include "support/messages.h"
#include "support/other_user.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

TEST(OwnFile, IsCreatedAndOpenedAgain) {
  const TemporaryFolder folder;
  const auto path = (folder.path() / "file").string();
  EXPECT_FALSE(open_own_file(path, O_RDONLY).is_open()) << "there is none yet";
  EXPECT_EQ(::write(open_own_file(path, O_RDWR | O_CREAT).get(), "abc", 3), 3);
  char bytes[8] = {};
  EXPECT_EQ(::read(open_own_file(path, O_RDONLY).get(), bytes, sizeof bytes), 3);
  expect_error<SystemError>([&] { open_own_file((folder.path() / "none/file").string(), O_RDWR | O_CREAT); },
                            "none/file", "No such file");
}

TEST(OwnFile, IsNoLink) {
  const TemporaryFolder folder;
  const auto target = folder.path() / "target", link = folder.path() / "link", dangling = folder.path() / "dangling";
  std::ofstream(target) << "content";
  std::filesystem::create_symlink(target, link);
  std::filesystem::create_symlink(folder.path() / "new", dangling);
  for (const auto& path : {link, dangling})
    for (const int flags : {O_RDONLY, O_RDWR | O_CREAT})
      expect_error<UsageError>([&] { open_own_file(path.string(), flags); }, path.string(), "symbolic link",
                               "remove it, or use another folder");
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "new"));
}

TEST(OwnFile, IsNeitherAPipeNorAFolder) {
  const TemporaryFolder folder;
  const auto pipe = (folder.path() / "pipe").string();
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0666), 0);
  for (const auto& path : {pipe, folder.path().string()})
    for (const int flags : {O_RDONLY, O_WRONLY | O_APPEND, O_RDWR | O_CREAT})
      expect_error<UsageError>([&] { open_own_file(path, flags); }, path, "not a regular file");
}

TEST(OwnFile, BelongsToThisUserOrToTheOwnerOfItsFolder) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give files to other users";
  const TemporaryFolder folder;
  const auto path = (folder.path() / "file").string();
  std::ofstream(path) << "content";
  ASSERT_EQ(::chown(path.c_str(), kOtherUser, kOtherUser), 0);
  expect_error<UsageError>([&] { open_own_file(path, O_RDWR); }, path, "belongs to user 54321");
  ASSERT_EQ(::chown(folder.path().c_str(), kOtherUser, kOtherUser), 0);
  EXPECT_TRUE(open_own_file(path, O_RDWR).is_open());
}

}  // namespace
}  // namespace lockstep
