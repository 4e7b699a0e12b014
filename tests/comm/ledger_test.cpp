#include "backends/shm/call_log.h"

#include <atomic>
#include <barrier>
#include <thread>

#include <gtest/gtest.h>

#include <lockstep/error.h>

#include "support/messages.h"

namespace lockstep::shm {
namespace {

using namespace std::chrono_literals;

/// Runs `body` with the ledger of each rank, on threads of their own.
void on_ledgers(int size, const std::function<void(int rank, Ledger&)>& body) {
  std::shared_ptr<Store> store = make_memory_store();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank)
    ranks.emplace_back([&, rank] {
      BackendContext context;
      context.rank = rank;
      context.size = size;
      context.store = store;
      context.timeout = 10s;
      Ledger ledger(context);
      body(rank, ledger);
    });
  for (auto& rank : ranks) rank.join();
}

TEST(Ledger, RanksThatMakeTheSameCallsGoOn) {
  std::atomic<int> calls{0};
  on_ledgers(3, [&](int, Ledger& ledger) {
    for (uint64_t call = 0; call < 5 * Ledger::kCalls; ++call) {
      ledger.write(call * 7919);
      ++calls;
    }
  });
  EXPECT_EQ(calls, 3 * 5 * static_cast<int>(Ledger::kCalls));
}

// Whatever the two are doing when the other writes: never do both pass by.
TEST(Ledger, OfTwoThatMakeDifferentCallsOneAlwaysSeesIt) {
  constexpr uint64_t kRounds = 4000;
  std::atomic<int> told{0};
  std::barrier both(2);
  on_ledgers(2, [&](int rank, Ledger& ledger) {
    for (uint64_t round = 0; round < kRounds; ++round) {
      both.arrive_and_wait();
      bool differs = round % 2 == 1;
      try {
        ledger.write(differs ? round * 2 + static_cast<uint64_t>(rank) : round);
      } catch (const MismatchError&) {
        EXPECT_TRUE(differs) << "round " << round;
        ++told;
      }
      both.arrive_and_wait();
      if (rank == 0) {
        EXPECT_EQ(told > 0, differs) << "round " << round;
        told = 0;
      }
      both.arrive_and_wait();
    }
  });
}

TEST(Ledger, TheLaterRankIsToldWhoDiffers) {
  std::barrier turns(2);
  on_ledgers(2, [&](int rank, Ledger& ledger) {
    if (rank == 0) ledger.write(1);
    turns.arrive_and_wait();
    if (rank == 1) expect_error<MismatchError>([&] { ledger.write(2); }, "rank 0", "another call");
  });
}

TEST(Ledger, ARankMayBeFarAhead) {
  std::barrier turns(2);
  std::atomic<uint64_t> behind{0};
  on_ledgers(2, [&](int rank, Ledger& ledger) {
    if (rank == 0)
      for (uint64_t call = 0; call < 3 * Ledger::kCalls; ++call) ledger.write(call);
    turns.arrive_and_wait();
    if (rank == 1)
      for (; behind < 3 * Ledger::kCalls; ++behind) ledger.write(behind);
  });
  EXPECT_EQ(behind, 3 * Ledger::kCalls);
}

}  // namespace
}  // namespace lockstep::shm
