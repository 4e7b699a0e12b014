// The memory under the shm backend. What the backend does with it is in the conformance suite.

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/error.h>

#include "backends/shm/arena.h"
#include "support/messages.h"

namespace lockstep::shm {
namespace {

std::vector<std::string> names_in_dev_shm() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    auto name = entry.path().filename().string();
    if (name.starts_with("lockstep-")) names.push_back(name);
  }
  return names;
}

/// Sets the variable until the object goes.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    ::setenv(name, value, 1);
  }
  ~Variable() { before_ ? ::setenv(name_, before_->c_str(), 1) : ::unsetenv(name_); }

 private:
  const char* name_;
  std::optional<std::string> before_;
};

/// Runs the body in a process of its own; true when it returns so.
bool in_child(const std::function<bool()>& body) {
  pid_t child = ::fork();
  if (child == 0) ::_exit(body() ? 0 : 1);
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(SharedMemory, IsSeenByAnotherProcessThroughItsAddress) {
  for (auto way : {SharedMemory::Kind::kUnnamed, SharedMemory::Kind::kNamed}) {
    auto memory = SharedMemory::create(way, 1 << 20);
    std::strcpy(memory->begin() + 5000, "hello");
    auto address = memory->handle();
    address.id += " as another process knows it";  // so that it is mapped anew
    EXPECT_TRUE(in_child([&] {
      auto same = SharedMemory::open(address);
      bool is_there = std::strcmp(same->begin() + 5000, "hello") == 0;
      std::strcpy(same->begin() + 5000, "answer");
      return is_there && same->begin() != memory->begin();
    }));
    EXPECT_STREQ(memory->begin() + 5000, "answer");
    memory->unlink();
  }
}

TEST(SharedMemory, IsMappedOnceInAProcess) {
  auto memory = SharedMemory::create(SharedMemory::Kind::kUnnamed, 1 << 20);
  EXPECT_EQ(SharedMemory::open(memory->handle()), memory);
}

TEST(SharedMemory, LeavesNoNameBehind) {
  auto before = names_in_dev_shm();
  auto unnamed = SharedMemory::create(SharedMemory::Kind::kUnnamed, 1 << 20);
  EXPECT_EQ(names_in_dev_shm(), before);
  auto named = SharedMemory::create(SharedMemory::Kind::kNamed, 1 << 20);
  EXPECT_EQ(names_in_dev_shm().size(), before.size() + 1);
  named->unlink();
  EXPECT_EQ(names_in_dev_shm(), before);
}

TEST(SharedMemory, OfAProcessThatIsGoneCannotBeOpened) {
  MemoryHandle address{"/proc/4194303/fd/3", "nobody", 1 << 20};
  expect_error<SystemError>([&] { SharedMemory::open(address); }, "/proc/4194303/fd/3", "No such file");
}

TEST(SharedMemory, OfAnotherSizeIsRefused) {
  auto memory = SharedMemory::create(SharedMemory::Kind::kUnnamed, 1 << 20);
  auto address = memory->handle();
  address.id += " of another";
  address.bytes *= 2;
  expect_error<UsageError>([&] { SharedMemory::open(address); }, "1048576", "2097152", "another process");
}

TEST(SharedMemory, GivesMemoryBack) {
  auto memory = SharedMemory::create(SharedMemory::Kind::kUnnamed, 64 << 20);
  auto resident = [&] {
    std::vector<unsigned char> pages((64 << 20) / 4096);
    ::mincore(memory->begin(), 64 << 20, pages.data());
    return std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return page & 1; });
  };
  memory->populate(0, 32 << 20);
  EXPECT_GE(resident(), (32 << 20) / 4096);
  memory->release(0, 32 << 20);
  EXPECT_EQ(resident(), 0);
}

// Docker's /dev/shm has 64 MB. The memory that needs none of it is not bounded; the other kind says what is needed.
TEST(SharedMemory, ATooSmallDevShmIsAnErrorWithTheSizeNeeded) {
  bool can_mount = in_child([] { return ::unshare(CLONE_NEWNS) == 0; });
  if (!can_mount) GTEST_SKIP() << "only root can mount a small /dev/shm";
  EXPECT_TRUE(in_child([] {
    ::unshare(CLONE_NEWNS);
    ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr);
    if (::mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=1m") != 0) return false;
    auto unnamed = SharedMemory::create(SharedMemory::Kind::kUnnamed, 8 << 20);
    unnamed->populate(0, 8 << 20);
    auto named = SharedMemory::create(SharedMemory::Kind::kNamed, 8 << 20);
    try {
      named->populate(0, 8 << 20);
    } catch (const SystemError& error) {
      std::string what = error.what();
      return what.find("8388608 bytes") != std::string::npos && what.find("--shm-size") != std::string::npos;
    }
    return false;
  }));
}

TEST(Arena, BlocksLieApartAndAreUsedAgain) {
  Arena arena(SharedMemory::Kind::kUnnamed);
  constexpr size_t kSmall = Arena::kOwnPages, kLarge = 1 << 20;
  char* first = arena.allocate(kSmall);
  char* second = arena.allocate(kLarge);
  char* third = arena.allocate(kSmall);
  EXPECT_GT(arena.offset_of(first).value(), 0u);
  EXPECT_GE(second, first + kSmall);
  EXPECT_GE(third, second + kLarge);
  arena.free(second);
  EXPECT_EQ(arena.allocate(kLarge), second);
  arena.free(first);
  arena.free(second);
  EXPECT_EQ(arena.allocate(kLarge + kSmall), first) << "neighbours that are free become one";
}

TEST(Arena, LargeBlocksShareNoPage) {
  Arena arena(SharedMemory::Kind::kUnnamed);
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  std::vector<std::pair<uintptr_t, uintptr_t>> pages;  // of each block, the first and the last
  std::vector<bool> is_large;
  for (size_t bytes : {100, 10'000, 1, 100'000, 8'192, 200}) {
    const auto begin = reinterpret_cast<uintptr_t>(arena.allocate(bytes));
    EXPECT_EQ(begin % Arena::kAlignment, 0u);
    pages.emplace_back(begin / page, (begin + bytes - 1) / page);
    is_large.push_back(bytes >= Arena::kOwnPages);
  }
  for (size_t a = 0; a < pages.size(); ++a)
    for (size_t b = 0; b < a; ++b)
      EXPECT_TRUE((!is_large[a] && !is_large[b]) || pages[a].second < pages[b].first ||
                  pages[b].second < pages[a].first)
          << a << " and " << b;
}

TEST(Arena, KnowsItsOwnMemoryOnly) {
  Arena arena(SharedMemory::Kind::kUnnamed);
  char elsewhere = 0;
  EXPECT_FALSE(arena.offset_of(&elsewhere));
  char* block = arena.allocate(1000);
  EXPECT_EQ(arena.offset_of(block + 7).value(), arena.offset_of(block).value() + 7);
}

TEST(Arena, RetiredBlocksStayUntilNobodyReadsThem) {
  Arena arena(SharedMemory::Kind::kUnnamed);
  bool is_unused = false;
  char* block = arena.allocate(1000);
  arena.retire({block}, [&] { return is_unused; });
  EXPECT_NE(arena.allocate(1000), block);
  is_unused = true;
  EXPECT_EQ(arena.allocate(1000), block);
}

TEST(Arena, IsOneForTheProcess) {
  auto arena = Arena::of_process();
  EXPECT_EQ(Arena::of_process(), arena);
  EXPECT_TRUE(in_child([&] { return Arena::of_process() != arena; })) << "a forked child has its own";
}

TEST(Arena, SaysWhenThereIsNoRoom) {
  Variable bytes("LOCKSTEP_SHM_BYTES", "33554432");
  Arena arena(SharedMemory::Kind::kUnnamed);
  char* half = arena.allocate(16 << 20);
  expect_error<SystemError>([&] { arena.allocate(20 << 20); }, "20971520 bytes", "33554432", "LOCKSTEP_SHM_BYTES");
  arena.free(half);
  EXPECT_NE(arena.allocate(20 << 20), nullptr);
}

TEST(Arena, RefusesASizeThatIsNone) {
  Variable bytes("LOCKSTEP_SHM_BYTES", "much");
  expect_error<UsageError>([] { Arena arena(SharedMemory::Kind::kUnnamed); }, "LOCKSTEP_SHM_BYTES", "\"much\"");
}

TEST(Arena, DetachedBytesAreOutOfReachOfOtherProcesses) {
  Arena arena(SharedMemory::Kind::kUnnamed);
  constexpr size_t kBytes = 100'000;
  char* before = arena.allocate(kBytes);
  char* block = arena.allocate(kBytes);
  char* after = arena.allocate(kBytes);
  for (char* each : {before, block, after}) std::memset(each, 'a', kBytes);
  const auto offset = arena.offset_of(block).value();
  arena.detach(block + 1000, kBytes - 2000);
  EXPECT_EQ(arena.offset_of(block + 1000), std::nullopt);
  EXPECT_EQ(arena.offset_of(after), offset + static_cast<uint64_t>(after - block));
  auto address = arena.memory().handle();
  address.id += " as another process knows it";
  ASSERT_TRUE(in_child([&] {
    auto same = SharedMemory::open(address);
    std::memset(same->begin() + (offset - static_cast<uint64_t>(block - before)), 'b',
                static_cast<size_t>(after - before) + kBytes);
    return true;
  }));
  EXPECT_EQ(std::count(block + 1000, block + kBytes - 1000, 'a'), static_cast<int64_t>(kBytes - 2000));
  EXPECT_EQ(std::count(before, before + kBytes, 'b'), static_cast<int64_t>(kBytes)) << "its neighbours stay shared";
  EXPECT_EQ(std::count(after, after + kBytes, 'b'), static_cast<int64_t>(kBytes));
  arena.free(block);
  EXPECT_NE(arena.allocate(kBytes), block) << "another process may still write there";
}

}  // namespace
}  // namespace lockstep::shm
