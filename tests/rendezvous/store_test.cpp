#include <lockstep/store.h>

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <thread>

#include <lockstep/error.h>
#include <lockstep/tcp_store.h>

#include "support/forked.h"
#include "support/messages.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

/// A path for one store.
class TemporaryPath {
 public:
  std::string file() const { return (folder_.path() / "store").string(); }

 private:
  TemporaryFolder folder_;
};

/// A store over TCP on loopback: one hosts it, the other connects.
class TcpPair {
 public:
  TcpPair() {
    std::ofstream(secret_, std::ios::binary) << "a secret of the tests, 32 bytes.";
    std::filesystem::permissions(secret_, std::filesystem::perms::owner_read);
  }

  std::shared_ptr<TcpStore> host() const {
    return std::make_shared<TcpStore>(TcpStoreOptions{.is_host = true, .secret_file = secret_});
  }
  std::shared_ptr<TcpStore> connect(int port) const {
    return std::make_shared<TcpStore>(TcpStoreOptions{.port = port, .secret_file = secret_, .timeout = 10s});
  }

 private:
  TemporaryFolder folder_;
  const std::string secret_ = (folder_.path() / "secret").string();
};

/// Two handles of one store, as two ranks have them.
struct Pair {
  std::shared_ptr<Store> one, two;
};

class Stores : public testing::TestWithParam<std::string> {
 protected:
  Pair open() {
    if (GetParam() == "file") return {open_file_store(path_.file()), open_file_store(path_.file())};
    if (GetParam() == "tcp") {
      auto host = tcp_.host();
      return {host, tcp_.connect(host->port())};
    }
    auto memory = make_memory_store();
    if (GetParam() == "memory") return {memory, memory};
    return {with_prefix(memory, "a/"), with_prefix(memory, "a/")};
  }
  TemporaryPath path_;
  TcpPair tcp_;
};

TEST_P(Stores, WhatOneRankSetsAnotherGets) {
  auto [one, two] = open();
  std::string bytes("any\0bytes\n\xff", 11);
  one->set("key", bytes);
  EXPECT_EQ(two->get("key", 1s), bytes);
  one->set("key", "");
  EXPECT_EQ(two->get("key", 1s), "");
  two->set(std::string("k\0ey", 4), "other");
  EXPECT_EQ(one->get(std::string("k\0ey", 4), 1s), "other");
  EXPECT_EQ(one->get("key", 1s), "");
}

TEST_P(Stores, GetWaitsForTheValue) {
  auto [one, two] = open();
  std::thread setter([store = two] { store->set("later", "here"); });
  EXPECT_EQ(one->get("later", 10s), "here");
  setter.join();
}

TEST_P(Stores, AreLeftToTheirParentByAForkedChild) {
  auto [one, two] = open();
  std::thread waiting([store = one] { EXPECT_EQ(store->get("later", 30s), "here"); });
  const int code = exit_code_of_fork([&] {
    if (GetParam() == "file" || GetParam() == "tcp")
      expect_error<UsageError>([&] { two->set("key", "value"); }, "was forked from", std::to_string(::getppid()),
                               "after the fork");
    one.reset();
    two.reset();
    if (testing::Test::HasFailure()) std::exit(1);
  });
  EXPECT_EQ(code, 0);
  two->set("later", "here");
  waiting.join();
  EXPECT_EQ(two->add("n", 1), 1);
  EXPECT_EQ(one->get("n", 1s), "1");
}

TEST_P(Stores, WaitingEndsWithTheNamesOfTheKeysThatDidNotCome) {
  auto [one, two] = open();
  two->set("present", "1");
  expect_error<TimeoutError>([&] { one->wait({"present", "absent", "gone"}, 20ms); }, "absent and", "gone", "20 ms");
  expect_error<TimeoutError>([&] { one->get("absent", 20ms); }, "absent");
}

TEST_P(Stores, AllGatherReturnsTheValuesInTheOrderOfRanks) {
  auto [one, two] = open();
  std::thread last(
      [store = two] { EXPECT_THAT(store->all_gather("host", 1, 2, "b", 10s), testing::ElementsAre("a", "b")); });
  EXPECT_THAT(one->all_gather("host", 0, 2, "a", 10s), testing::ElementsAre("a", "b"));
  last.join();
  EXPECT_EQ(one->get("host/1", 1s), "b");
  expect_error<TimeoutError>([&, store = two] { store->all_gather("port", 0, 3, "x", 20ms); }, "port/1", "port/2");
}

TEST_P(Stores, AddCountsFromZeroOverAllRanks) {
  auto [one, two] = open();
  EXPECT_EQ(one->add("n", 5), 5);
  EXPECT_EQ(two->add("n", -7), -2);
  EXPECT_EQ(one->get("n", 1s), "-2");
  one->set("word", "five");
  expect_error<UsageError>([&] { two->add("word", 1); }, "word", "five");
}

TEST_P(Stores, AddRefusesASumThatIsTooLarge) {
  auto [one, two] = open();
  const auto most = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(one->add("n", most), most);
  expect_error<UsageError>([&] { two->add("n", 1); }, "n'", std::to_string(most), "64 bits");
  EXPECT_EQ(two->add("n", 0), most);
}

TEST_P(Stores, AddLosesNothingWhenManyAddAtOnce) {
  auto [one, two] = open();
  std::vector<std::thread> threads;
  for (auto store : {one, two, one, two})
    threads.emplace_back([store] {
      for (int i = 0; i < 100; ++i) store->add("n", 1);
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(one->add("n", 0), 400);
}

TEST_P(Stores, CompareSetChangesOnlyWhatWasExpected) {
  auto [one, two] = open();
  EXPECT_EQ(one->compare_set("k", "wrong", "x"), "");
  EXPECT_FALSE(two->check({"k"}));
  EXPECT_EQ(one->compare_set("k", "", "first"), "first");
  EXPECT_EQ(two->compare_set("k", "", "second"), "first");
  EXPECT_EQ(two->compare_set("k", "first", "second"), "second");
  EXPECT_EQ(one->get("k", 1s), "second");
}

TEST_P(Stores, CheckAndErase) {
  auto [one, two] = open();
  one->set("a", "1");
  EXPECT_TRUE(two->check({"a"}));
  EXPECT_FALSE(two->check({"a", "b"}));
  EXPECT_TRUE(two->check({}));
  EXPECT_TRUE(two->erase("a"));
  EXPECT_FALSE(one->erase("a"));
  EXPECT_FALSE(one->check({"a"}));
}

INSTANTIATE_TEST_SUITE_P(All, Stores, testing::Values("memory", "file", "prefix", "tcp"),
                         [](auto& info) { return info.param; });

TEST(PrefixStore, KeepsPrefixesApart) {
  auto memory = make_memory_store();
  with_prefix(memory, "a/")->set("k", "1");
  EXPECT_FALSE(with_prefix(memory, "b/")->check({"k"}));
  EXPECT_EQ(memory->get("a/k", 1s), "1");
}

TEST(TcpStore, SaysThatItsHostIsGone) {
  TcpPair tcp;
  auto host = tcp.host();
  auto other = tcp.connect(host->port());
  EXPECT_EQ(other->port(), host->port());
  host.reset();
  expect_error<PeerError>([&] { other->set("key", "value"); }, "pid " + std::to_string(::getpid()), "has ended");
}

TEST(TcpStore, RefusesOneWithAnotherSecretAndAPortInUse) {
  TcpPair tcp;
  auto host = tcp.host();
  TemporaryFolder folder;
  const auto another = (folder.path() / "secret").string();
  std::ofstream(another, std::ios::binary) << std::string(32, 'x');
  std::filesystem::permissions(another, std::filesystem::perms::owner_read);
  expect_error<PeerError>([&] { TcpStore({.port = host->port(), .secret_file = another}); }, "same secret");
  expect_error<SystemError>([&] { TcpStore({.port = host->port(), .is_host = true, .secret_file = another}); },
                            "in use by pid " + std::to_string(::getpid()));
}

}  // namespace
}  // namespace lockstep
