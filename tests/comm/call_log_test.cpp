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

/// Runs `body` with the call_log of each rank, on threads of their own.
void on_ledgers(int size, const std::function<void(int rank, CallLog&)>& body) {
  std::shared_ptr<Store> store = make_memory_store();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank)
    ranks.emplace_back([&, rank] {
      BackendContext context;
      context.rank = rank;
      context.size = size;
      context.store = store;
      context.timeout = 10s;
      CallLog call_log(context);
      body(rank, call_log);
    });
  for (auto& rank : ranks) rank.join();
}

TEST(CallLog, RanksThatMakeTheSameCallsGoOn) {
  std::atomic<int> calls{0};
  on_ledgers(3, [&](int, CallLog& call_log) {
    for (uint64_t call = 0; call < 5 * CallLog::kCalls; ++call) {
      call_log.write(call * 7919);
      ++calls;
    }
  });
  EXPECT_EQ(calls, 3 * 5 * static_cast<int>(CallLog::kCalls));
}

// Whatever the two are doing when the other writes: never do both pass by.
TEST(CallLog, OfTwoThatMakeDifferentCallsOneAlwaysSeesIt) {
  constexpr uint64_t kRounds = 4000;
  std::atomic<int> told{0};
  std::barrier both(2);
  on_ledgers(2, [&](int rank, CallLog& call_log) {
    for (uint64_t round = 0; round < kRounds; ++round) {
      both.arrive_and_wait();
      bool differs = round % 2 == 1;
      try {
        call_log.write(differs ? round * 2 + static_cast<uint64_t>(rank) : round);
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

TEST(CallLog, TheLaterRankIsToldWhoDiffers) {
  std::barrier turns(2);
  on_ledgers(2, [&](int rank, CallLog& call_log) {
    if (rank == 0) call_log.write(1);
    turns.arrive_and_wait();
    if (rank == 1) expect_error<MismatchError>([&] { call_log.write(2); }, "rank 0", "a different call");
  });
}

TEST(CallLog, ARankMayBeFarAhead) {
  std::barrier turns(2);
  std::atomic<uint64_t> behind{0};
  on_ledgers(2, [&](int rank, CallLog& call_log) {
    if (rank == 0)
      for (uint64_t call = 0; call < 3 * CallLog::kCalls; ++call) call_log.write(call);
    turns.arrive_and_wait();
    if (rank == 1)
      for (; behind < 3 * CallLog::kCalls; ++behind) call_log.write(behind);
  });
  EXPECT_EQ(behind, 3 * CallLog::kCalls);
}

}  // namespace
}  // namespace lockstep::shm
