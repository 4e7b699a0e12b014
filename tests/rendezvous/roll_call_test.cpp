#include "rendezvous/roll_call.h"

#include <unistd.h>

#include <cstdlib>
#include <thread>

#include <lockstep/error.h>
#include <lockstep/version.h>

#include "support/messages.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

/// What another process, number 4711, would have written.
std::string announced(const std::string& version, const std::string& world_size, const std::string& backend) {
  return version + "\n" + world_size + "\n" + backend + "\n4711\nelsewhere\nid\nnonce\n";
}

TEST(RollCall, EveryRankLearnsOfEveryOther) {
  auto store = make_memory_store();
  std::vector<std::vector<Peer>> seen(3);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank)
    ranks.emplace_back([&, rank] { seen[rank] = call_roll(*store, {rank, 3, "gloo"}, 10s); });
  for (auto& rank : ranks) rank.join();
  for (const auto& peers : seen) {
    ASSERT_EQ(peers.size(), 3u);
    for (int r = 0; r < 3; ++r) {
      EXPECT_EQ(peers[r].rank, r);
      EXPECT_EQ(peers[r].pid, ::getpid());
      EXPECT_FALSE(peers[r].host.empty());
      EXPECT_EQ(peers[r].host_id, peers[0].host_id);
    }
  }
}

TEST(RollCall, NamesTheRanksThatDidNotCome) {
  auto store = make_memory_store();
  std::thread other([&] { EXPECT_THROW(call_roll(*store, {2, 5, "gloo"}, 50ms), TimeoutError); });
  expect_error<TimeoutError>(
      [&] {
        call_roll(*store, {0, 5, "gloo"}, 50ms);
      },
      "rank 0", "of 5 ranks", "50 ms", "1", "3 and 4");
  other.join();
}

TEST(RollCall, RefusesARankThatIsThereAlready) {
  auto store = make_memory_store();
  store->set("roll_call/0", announced(LOCKSTEP_VERSION_STRING, "2", "gloo"));
  expect_error<MismatchError>(
      [&] {
        call_roll(*store, {0, 2, "gloo"}, 50ms);
      },
      "rank 0", "pid 4711 on elsewhere", std::to_string(::getpid()), "file://");
}

TEST(RollCall, RefusesAnotherWorldSizeEvenWhenRanksAreMissing) {
  auto store = make_memory_store();
  store->set("roll_call/1", announced(LOCKSTEP_VERSION_STRING, "2", "gloo"));
  expect_error<MismatchError>(
      [&] {
        call_roll(*store, {0, 4, "gloo"}, 50ms);
      },
      "world size is 4 here", "2 for rank 1", "pid 4711 on elsewhere");
}

TEST(RollCall, RefusesAnotherVersion) {
  auto store = make_memory_store();
  store->set("roll_call/1", announced("9.9.9", "2", "gloo"));
  expect_error<MismatchError>(
      [&] {
        call_roll(*store, {0, 2, "gloo"}, 50ms);
      },
      LOCKSTEP_VERSION_STRING, "9.9.9", "rank 1");
}

TEST(RollCall, RefusesAnotherBackend) {
  auto store = make_memory_store();
  store->set("roll_call/1", announced(LOCKSTEP_VERSION_STRING, "2", "shm"));
  expect_error<MismatchError>(
      [&] {
        call_roll(*store, {0, 2, "gloo"}, 50ms);
      },
      "backend is gloo here", "shm for rank 1");
}

// As after a restart in a container, where pid and host are what they were.
TEST(RollCall, RefusesItsOwnAnnouncementOfAnEarlierJob) {
  auto store = make_memory_store();
  call_roll(*store, {0, 1, "gloo"}, 1s);
  expect_error<MismatchError>([&] { call_roll(*store, {0, 1, "gloo"}, 1s); }, "already joined", "earlier job");
}

TEST(RollCall, TakesTheHostIdThatIsSet) {
  ::setenv("LOCKSTEP_HOST_ID", "rack 7", 1);
  auto store = make_memory_store();
  auto peers = call_roll(*store, {0, 1, "gloo"}, 1s);
  ::unsetenv("LOCKSTEP_HOST_ID");
  EXPECT_EQ(peers[0].host_id, "rack 7");
}

}  // namespace
}  // namespace lockstep
