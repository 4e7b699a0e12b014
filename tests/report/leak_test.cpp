#include <sys/stat.h>

#include <fstream>
#include <sstream>

#include <gtest/gtest.h>

#include "rendezvous/store/store_server.h"
#include "report/records.h"
#include "support/rank_process.h"
#include "support/slowness.h"
#include "support/store_host.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

struct Used {
  int64_t resident_bytes = 0, descriptors = 0, threads = 0;
};

Used next_use(RankProcess& rank) {
  Used used;
  std::string word;
  std::istringstream(rank.expect_line("used ", std::chrono::minutes(10))) >> word >> used.resident_bytes >>
      used.descriptors >> used.threads;
  return used;
}

// A leak of 100 bytes in a step is 7 MB in the last 70,000 of 100,000 steps.
TEST(Leaks, ManyStepsUseNoMoreMemoryDescriptorsAndKeysThanTheFirst) {
  const int steps = is_long_tier() ? 100000 : 4000;
  const TemporaryFolder folder;
  const auto secret_file = (folder.path() / "secret").string();
  std::ofstream(secret_file) << "a secret of the tests, 32 bytes.";
  ASSERT_EQ(::chmod(secret_file.c_str(), 0600), 0);
  const StoreHost store;
  JobProcesses job(TEST_RANKS, 2, {"running_rank", "many_steps", folder.path() / "run", std::to_string(steps)},
                   {{"LOCKSTEP_STORE_HOSTED", "1"},
                    {"LOCKSTEP_SECRET_FILE", secret_file},
                    {"MASTER_ADDR", "127.0.0.1"},
                    {"MASTER_PORT", std::to_string(store.server.port())}});
  job.start_all();
  std::vector<Used> first(2), last(2);
  size_t first_keys = 0, last_keys = 0;
  for (int part = 1; part <= 10; ++part) {
    for (int rank : {0, 1}) {
      last[rank] = next_use(job[rank]);
      if (part == 3) first[rank] = last[rank];
    }
    last_keys = store.server.keys();
    if (part == 3) first_keys = last_keys;
  }
  for (int rank : {0, 1}) job[rank].say("end");
  for (int rank : {0, 1}) {
    EXPECT_EQ(job[rank].wait(), 0) << job[rank].output();
    if (kSlowness == 1) {  // sanitizers keep freed memory
      EXPECT_LT(last[rank].resident_bytes - first[rank].resident_bytes, 4 << 20) << "rank " << rank;
    }
    EXPECT_EQ(last[rank].descriptors, first[rank].descriptors) << "rank " << rank;
    EXPECT_EQ(last[rank].threads, first[rank].threads) << "rank " << rank;
  }
  EXPECT_GT(first_keys, 0);
  EXPECT_EQ(last_keys, first_keys);
  EXPECT_EQ(records_of(folder.path() / "run", "step").size(), steps / 5);
}

}  // namespace
}  // namespace lockstep
