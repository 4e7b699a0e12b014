#include "rendezvous/join_request.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

#include <lockstep/error.h>
#include <lockstep/logging.h>
#include <lockstep/version.h>

#include "base/text.h"
#include "support/messages.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

/// What another process, number 4711, would have written.
struct Announced {
  int rank = 0;
  std::string version = LOCKSTEP_VERSION_STRING;
  int world_size = 2;
  std::string backend = "gloo";
  std::string job{};
  int generation = 0;
  std::string build_id{};

  std::string text() const {
    return lockstep::text(version, '\n', world_size, '\n', backend, '\n', job, '\n', generation, '\n', rank,
                          "\n4711\nelsewhere\nid\n", build_id, "\nnonce\n");
  }
};

TEST(WaitForAllRanks, EveryRankLearnsOfEveryOther) {
  auto store = make_memory_store();
  std::vector<std::vector<Peer>> seen(3);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank)
    ranks.emplace_back([&, rank] { seen[rank] = wait_for_all_ranks(*store, {rank, 3, "gloo"}, 10s); });
  for (auto& rank : ranks) rank.join();
  for (const auto& peers : seen) {
    ASSERT_EQ(peers.size(), 3u);
    for (int r = 0; r < 3; ++r) {
      EXPECT_EQ(peers[r].rank, r);
      EXPECT_EQ(peers[r].process.pid, ::getpid());
      EXPECT_FALSE(peers[r].process.host.empty());
      EXPECT_EQ(peers[r].build_id, peers[0].build_id);
      EXPECT_EQ(peers[r].process.host_id, peers[0].process.host_id);
    }
  }
}

TEST(WaitForAllRanks, NamesTheRanksThatDidNotCome) {
  auto store = make_memory_store();
  std::thread other([&] { EXPECT_THROW(wait_for_all_ranks(*store, {2, 5, "gloo"}, 50ms), TimeoutError); });
  expect_error<TimeoutError>(
      [&] {
        wait_for_all_ranks(*store, {0, 5, "gloo"}, 50ms);
      },
      "rank 0", "of 5 ranks", "50 ms", "1", "3 and 4");
  other.join();
}

TEST(WaitForAllRanks, RefusesARankThatIsThereAlready) {
  auto store = make_memory_store();
  store->set("join_request/0/0", Announced{.rank = 0}.text());
  expect_error<MismatchError>(
      [&] {
        wait_for_all_ranks(*store, {0, 2, "gloo"}, 50ms);
      },
      "rank 0", "pid 4711 on elsewhere", std::to_string(::getpid()), "file://");
}

TEST(WaitForAllRanks, RefusesAnotherWorldSizeEvenWhenRanksAreMissing) {
  auto store = make_memory_store();
  store->set("join_request/0/1", Announced{.rank = 1}.text());
  expect_error<MismatchError>(
      [&] {
        wait_for_all_ranks(*store, {0, 4, "gloo"}, 50ms);
      },
      "world size is 4 here", "2 for rank 1", "pid 4711 on elsewhere");
}

TEST(WaitForAllRanks, RefusesAnotherVersion) {
  auto store = make_memory_store();
  store->set("join_request/0/1", Announced{.rank = 1, .version = "9.9.9"}.text());
  expect_error<MismatchError>(
      [&] {
        wait_for_all_ranks(*store, {0, 2, "gloo"}, 50ms);
      },
      LOCKSTEP_VERSION_STRING, "9.9.9", "rank 1");
}

TEST(WaitForAllRanks, RefusesAnotherBackend) {
  auto store = make_memory_store();
  store->set("join_request/0/1", Announced{.rank = 1, .backend = "shm"}.text());
  expect_error<MismatchError>(
      [&] {
        wait_for_all_ranks(*store, {0, 2, "gloo"}, 50ms);
      },
      "backend is gloo here", "shm for rank 1");
}

TEST(WaitForAllRanks, RefusesAnotherJob) {
  auto store = make_memory_store();
  store->set("join_request/0/1", Announced{.rank = 1, .job = "slurm 8"}.text());
  expect_error<MismatchError>(
      [&] {
        wait_for_all_ranks(*store, {0, 2, "gloo", "slurm 7"}, 50ms);
      },
      "slurm 7 here", "slurm 8 for rank 1", "port");
}

TEST(WaitForAllRanks, DoesNotCompareJobsThatHaveNoName) {
  auto store = make_memory_store();
  store->set("join_request/0/1", Announced{.rank = 1, .job = ""}.text());
  EXPECT_EQ(wait_for_all_ranks(*store, {0, 2, "gloo", "slurm 7"}, 1s).size(), 2u);
}

TEST(WaitForAllRanks, RefusesAProcessOfAnEarlierStart) {
  auto store = make_memory_store();
  store->set("join_request/0/1", Announced{.rank = 1, .generation = 3}.text());
  expect_error<MismatchError>(
      [&] {
        wait_for_all_ranks(*store, {0, 2, "gloo", "", 4}, 50ms);
      },
      "restart count is 4 here", "3 for rank 1", "pid 4711 on elsewhere", "earlier start");
}

// The one that came first says what the job is: others need not wait for the time-out to learn that they do not fit.
TEST(WaitForAllRanks, ARankThatDoesNotFitIsRefusedAtOnceAndTheOthersLearnWhy) {
  auto store = make_memory_store();
  std::thread first([&] {
    expect_error<MismatchError>(
        [&] {
          wait_for_all_ranks(*store, {0, 2, "gloo"}, 60s);
        },
        "world size is 2 here", "3 for rank 1", std::to_string(::getpid()));
  });
  store->get("join_request/0/0", 10s);
  expect_error<MismatchError>(
      [&] {
        wait_for_all_ranks(*store, {1, 3, "gloo"}, 60s);
      },
      "world size is 3 here", "2 for rank 0");
  first.join();
}

TEST(WaitForAllRanks, TakesAPlaceTheWayItIsTold) {
  auto store = make_memory_store();
  std::string key;
  auto peers = wait_for_all_ranks(*store, {0, 1, "gloo"}, 1s, [&](const std::string& wanted, const std::string& value) {
    key = wanted;
    return store->compare_set(wanted, "", value);
  });
  EXPECT_EQ(key, "join_request/0/0");
  EXPECT_EQ(peers.size(), 1u);
}

TEST(WaitForAllRanks, WarnsOfAnotherBuildOfTheProgram) {
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, const std::string& line) { lines.push_back(line); });
  auto store = make_memory_store();
  store->set("join_request/0/1", Announced{.rank = 1, .build_id = "0123abcd"}.text());
  auto peers = wait_for_all_ranks(*store, {0, 2, "gloo"}, 1s);
  set_log_sink(nullptr);
  if (peers[0].build_id.empty()) GTEST_SKIP() << "the linker gave this program no build id";
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_THAT(lines[0], testing::AllOf(testing::HasSubstr("rank 1 (pid 4711 on elsewhere)"),
                                       testing::HasSubstr("a different build")));
}

// As after a restart in a container, where pid and host are what they were.
TEST(WaitForAllRanks, RefusesItsOwnAnnouncementOfAnEarlierJob) {
  auto store = make_memory_store();
  wait_for_all_ranks(*store, {0, 1, "gloo"}, 1s);
  expect_error<MismatchError>([&] { wait_for_all_ranks(*store, {0, 1, "gloo"}, 1s); }, "already joined", "earlier job");
}

TEST(WaitForAllRanks, CountsTheJoinsOfThisProcessForEachRankAndStore) {
  auto store = make_memory_store(), other = make_memory_store();
  EXPECT_EQ(count_join(*store, 0), 0);
  EXPECT_EQ(count_join(*store, 0), 1);
  EXPECT_EQ(count_join(*store, 1), 0) << "a rank that is another thread of this process";
  EXPECT_EQ(count_join(*other, 0), 0);
  const pid_t child = ::fork();
  if (child == 0) ::_exit(count_join(*store, 0));
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "another process";
}

TEST(WaitForAllRanks, IsCalledAnewForEachJoin) {
  auto store = make_memory_store();
  for (int join = 0; join < 3; ++join) {
    std::thread other([&] { wait_for_all_ranks(*store, {1, 2, "gloo", "", 0, join}, 10s); });
    EXPECT_EQ(wait_for_all_ranks(*store, {0, 2, "gloo", "", 0, join}, 10s).size(), 2u);
    other.join();
  }
  expect_error<TimeoutError>(
      [&] {
        wait_for_all_ranks(*store, {0, 2, "gloo", "", 0, 3}, 50ms);
      },
      "missing: rank 1", "took part in join 3 but not in join 4", "same number of times");
}

TEST(WaitForAllRanks, TakesTheHostIdThatIsSet) {
  ::setenv("LOCKSTEP_HOST_ID", "rack 7", 1);
  auto store = make_memory_store();
  auto peers = wait_for_all_ranks(*store, {0, 1, "gloo"}, 1s);
  ::unsetenv("LOCKSTEP_HOST_ID");
  EXPECT_EQ(peers[0].process.host_id, "rack 7");
}

}  // namespace
}  // namespace lockstep
