#include <lockstep/store.h>

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <latch>
#include <limits>
#include <map>
#include <sstream>
#include <thread>

#include <lockstep/error.h>
#include <lockstep/tcp_store.h>

#include "support/child_process.h"
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

constexpr int kWords = 1000;

/// Appends the words "`name`0 " to "`name`999 " to the key "words".
void append_words(Store& store, char name) {
  for (int word = 0; word < kWords; ++word) store.append("words", name + std::to_string(word) + ' ');
}

/// Expects the words of so many callers of append_words: all words, none torn, those of each caller in their order.
void expect_words(const std::string& appended, int callers) {
  std::istringstream words(appended);
  std::map<char, int> next;
  int count = 0;
  for (std::string word; words >> word; ++count)
    ASSERT_EQ(word.substr(1), std::to_string(next[word[0]]++)) << "word " << count << " of " << word[0];
  EXPECT_EQ(count, callers * kWords);
  EXPECT_EQ(next.size(), static_cast<size_t>(callers));
}

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

// --- append

TEST_P(Stores, AppendTakesAMissingKeyForEmpty) {
  auto [one, two] = open();
  one->append("key", std::string("a\0b", 3));
  EXPECT_EQ(two->get("key", 1s), std::string("a\0b", 3));
  two->append("key", std::string("\0c", 2));
  EXPECT_EQ(one->get("key", 1s), std::string("a\0b\0c", 5));
  two->set("key", "new");
  one->append("key", "er");
  EXPECT_EQ(two->get("key", 1s), "newer");
  EXPECT_TRUE(two->erase("key"));
  one->append("key", "again");
  EXPECT_EQ(two->get("key", 1s), "again");
}

TEST_P(Stores, AppendOfNothingMakesAMissingKey) {
  auto [one, two] = open();
  EXPECT_FALSE(two->check({"key"}));
  one->append("key", "");
  EXPECT_EQ(two->get("key", 1s), "");
  one->append("key", "x");
  one->append("key", "");
  EXPECT_EQ(two->get("key", 1s), "x");
}

TEST_P(Stores, AppendWakesThoseWhoWait) {
  auto [one, two] = open();
  std::jthread appender([store = two] { store->append("later", "here"); });
  EXPECT_EQ(one->get("later", 10s), "here");
}

TEST_P(Stores, AppendLosesNothingWhenManyAppendAtOnce) {
  auto [one, two] = open();
  std::vector<std::thread> threads;
  std::latch all_threads(4);
  for (auto store : {one, two, one, two})
    threads.emplace_back([&, store, name = static_cast<char>('a' + threads.size())] {
      all_threads.arrive_and_wait();
      append_words(*store, name);
    });
  for (auto& thread : threads) thread.join();
  expect_words(one->get("words", 1s), 4);
}

// --- several keys at once

TEST_P(Stores, MultiGetReturnsTheValuesInTheOrderOfTheKeys) {
  auto [one, two] = open();
  const std::string zero("\0", 1);
  one->set("a", "1");
  one->set("b", "");
  one->set(zero, zero + "2");
  EXPECT_THAT(two->multi_get({"b", zero, "a", zero}, 1s), testing::ElementsAre("", zero + "2", "1", zero + "2"));
  EXPECT_THAT(two->multi_get({"a"}, 0ms), testing::ElementsAre("1"));
}

TEST_P(Stores, MultiGetOfNoKeysReturnsAtOnce) {
  auto [one, two] = open();
  EXPECT_THAT(one->multi_get({}, 0ms), testing::IsEmpty());
}

TEST_P(Stores, MultiGetBlocksUntilTheLastKeyHasAValue) {
  auto [one, two] = open();
  auto got = std::async(std::launch::async, [store = one] { return store->multi_get({"a", "b", "c"}, 30s); });
  two->set("c", "3");
  two->set("a", "1");
  EXPECT_EQ(got.wait_for(30ms), std::future_status::timeout);
  two->set("b", "2");
  EXPECT_THAT(got.get(), testing::ElementsAre("1", "2", "3"));
}

TEST_P(Stores, MultiGetEndsWithTheNamesOfTheKeysThatDidNotCome) {
  auto [one, two] = open();
  two->multi_set({{"present", "1"}, {"here", "2"}});
  const auto error = error_of<TimeoutError>([&, store = one] {
    store->multi_get({"present", "absent", "here", "gone"}, 20ms);
  });
  EXPECT_THAT(
      error, testing::AllOf(testing::HasSubstr("absent and"), testing::HasSubstr("gone"), testing::HasSubstr("20 ms")));
  EXPECT_THAT(error, testing::Not(testing::AnyOf(testing::HasSubstr("present"), testing::HasSubstr("here"))));
  EXPECT_THAT(one->multi_get({"present", "here"}, 1s), testing::ElementsAre("1", "2"));
}

TEST_P(Stores, MultiSetSetsEveryKey) {
  auto [one, two] = open();
  const std::string zero("\0", 1);
  one->set("a", "old");
  one->multi_set({{"a", "1"}, {"b", zero}, {zero, ""}, {"c", "first"}, {"c", "last"}});
  EXPECT_THAT(two->multi_get({"a", "b", zero, "c"}, 1s), testing::ElementsAre("1", zero, "", "last"));
  one->multi_set({});
  EXPECT_EQ(two->get("a", 1s), "1");
}

TEST_P(Stores, MultiSetWakesThoseWhoWaitWhenAllItsKeysAreThere) {
  auto [one, two] = open();
  std::vector<std::pair<std::string, std::string>> values;
  std::vector<std::string> keys;
  for (int key = 0; key < 200; ++key) {
    keys.push_back(std::to_string(key));
    values.emplace_back(keys.back(), "value");
  }
  for (int round = 0; round < 20; ++round) {
    std::jthread setter([&, store = two] { store->multi_set(values); });
    one->wait({keys.front()}, 30s);
    EXPECT_TRUE(one->check(keys)) << "in round " << round;
    setter.join();
    for (const auto& key : keys) one->erase(key);
  }
}

TEST_P(Stores, MultiGetNeverSeesAPartOfAMultiSet) {
  auto [one, two] = open();
  std::vector<std::string> keys;
  for (int key = 0; key < 50; ++key) keys.push_back(std::to_string(key));
  std::jthread setter([&, store = two](const std::stop_token& is_over) {
    for (int round = 0; !is_over.stop_requested(); ++round) {
      std::vector<std::pair<std::string, std::string>> values;
      for (const auto& key : keys) values.emplace_back(key, std::to_string(round));
      store->multi_set(values);
    }
  });
  for (int read = 0; read < 1000 && !HasFailure(); ++read) {
    const auto values = one->multi_get(keys, 30s);
    EXPECT_THAT(values, testing::Each(values.front())) << "at read " << read;
  }
}

// --- other calls

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

/// Makes the processes append their words at the same time, and expects all words in the store.
void expect_words_of(const std::vector<std::unique_ptr<ChildProcess>>& ranks, Store& store) {
  for (const auto& rank : ranks) ASSERT_EQ(rank->read_line(), "open");
  for (const auto& rank : ranks) rank->write_line("append");
  for (const auto& rank : ranks) ASSERT_EQ(rank->read_line(), "appended");
  expect_words(store.get("words", 1s), static_cast<int>(ranks.size()));
}

TEST(Processes, LoseNothingWhenTheyAppendToAFileAtOnce) {
  TemporaryPath path;
  std::vector<std::unique_ptr<ChildProcess>> ranks;
  for (const char name : {'a', 'b', 'c'})
    ranks.push_back(std::make_unique<ChildProcess>([&, name](const ChildProcess::Parent& test) {
      auto store = open_file_store(path.file());
      test.write_line("open");
      test.read_line();
      append_words(*store, name);
      test.write_line("appended");
      test.read_line();
    }));
  expect_words_of(ranks, *open_file_store(path.file()));
}

TEST(Processes, LoseNothingWhenTheyAppendOverTcpAtOnce) {
  TcpPair tcp;
  std::vector<std::unique_ptr<ChildProcess>> ranks;
  for (const char name : {'a', 'b', 'c'})
    ranks.push_back(std::make_unique<ChildProcess>([&, name](const ChildProcess::Parent& test) {
      auto store = tcp.connect(std::stoi(test.read_line()));
      test.write_line("open");
      test.read_line();
      append_words(*store, name);
      test.write_line("appended");
      test.read_line();
    }));
  auto host = tcp.host();
  for (auto& rank : ranks) rank->write_line(std::to_string(host->port()));
  expect_words_of(ranks, *host);
}

TEST(PrefixStore, KeepsPrefixesApart) {
  auto memory = make_memory_store();
  with_prefix(memory, "a/")->set("k", "1");
  EXPECT_FALSE(with_prefix(memory, "b/")->check({"k"}));
  EXPECT_EQ(memory->get("a/k", 1s), "1");
  with_prefix(memory, "b/")->append("k", "2");
  with_prefix(memory, "c/")->multi_set({{"k", "3"}, {"l", "4"}});
  EXPECT_THAT(memory->multi_get({"a/k", "b/k", "c/k", "c/l"}, 1s), testing::ElementsAre("1", "2", "3", "4"));
  EXPECT_THAT(with_prefix(memory, "c/")->multi_get({"l", "k"}, 1s), testing::ElementsAre("4", "3"));
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
