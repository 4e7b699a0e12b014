// Jobs on a host that runs out of memory, has little shared memory, or whose clock jumps.

#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "attack/attacked_job.h"
#include "support/small_memory.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

// --- memory

TEST(OutOfMemory, IsReportedAsSuchWithTheRank) {
  SmallMemory group(int64_t{3} << 29);
  if (group.path().empty()) GTEST_SKIP() << "no control group for memory can be made here: run as root";
  const std::string enter = "echo $$ > " + group.path() + "/cgroup.procs && exec \"$@\"";
  AttackedJob job({.ranks = 2, .around_launcher = {"sh", "-c", enter, "job"}});
  ASSERT_TRUE(job.advances()) << job.process().output();
  job.control().should_eat = true;
  EXPECT_EQ(job.process().wait(60s), 4) << job.process().output();
  const auto reports = lines_after(job.process().output(), "{");
  ASSERT_EQ(reports.size(), 1u) << job.process().output();
  const auto report = nlohmann::json::parse("{" + reports[0]);
  EXPECT_EQ(report["culprit"]["rank"], 1) << report;
  EXPECT_THAT(report["culprit"]["how"].get<std::string>(), HasSubstr("out of memory")) << report;
  EXPECT_THAT(report["remedy"].get<std::string>(), HasSubstr("memory")) << report;
  EXPECT_EQ(job.rank(0).outcome, RankOutcome::kPeerError);
  EXPECT_EQ(job.rank(0).culprit, 1);
  job.expect_nothing_left();
}

// --- shared memory

/// A job whose /dev/shm holds little.
class SmallDevShm : public testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can mount /dev/shm";
  }

  static AttackedJob::Options small(const std::string& backend, int kib = 1024) {
    const std::string mount = "mount -t tmpfs -o size=" + std::to_string(kib) + "k tmpfs /dev/shm && exec \"$@\"";
    return {.ranks = 2, .backend = backend, .around_launcher = {"unshare", "-m", "sh", "-c", mount, "job"}};
  }

  /// In a PID namespace for each rank, where shared memory needs names in /dev/shm.
  static AttackedJob::Options small_with_names(const std::string& backend, int kib = 1024) {
    auto options = small(backend, kib);
    options.around_rank = {"unshare", "--pid", "--mount", "--fork", "--mount-proc"};
    return options;
  }

  static bool has_ended(AttackedJob& job) {
    for (int r = 0; r < job.size(); ++r)
      if (job.rank(r).outcome == RankOutcome::kNone) return false;
    return true;
  }

  /// The job trains with calls of all sizes, or every rank gets an error that says what to do.
  static void expect_training_or_advice(AttackedJob& job) {
    ASSERT_TRUE(eventually([&] { return has_ended(job) || job.rank(0).steps >= 50; }, 20s))
        << "a rank was killed, or hangs: " << job.process().output();
    if (!has_ended(job)) return job.expect_right_results();
    EXPECT_EQ(job.process().wait(60s), 3) << job.process().output();
    EXPECT_THAT(job.process().output(),
                AllOf(HasSubstr("/dev/shm has"), HasSubstr("--shm-size"), HasSubstr("gloo"), Not(HasSubstr("SIGBUS"))));
    job.expect_nothing_left();
  }
};

TEST_F(SmallDevShm, IsEnoughForRanksThatSeeEachOther) {
  AttackedJob job(small("shm"));
  ASSERT_TRUE(job.advances(50)) << job.process().output();
  job.expect_right_results();
}

// With 1 MB the group cannot be made. With 3 to 4 MB there is room for the group, but not for all tensors.
TEST_F(SmallDevShm, DoesNotKillRanksInContainersOfTheirOwn) {
  for (int kib : {1024, 3164, 3172, 4096}) {
    SCOPED_TRACE(std::to_string(kib) + " KiB");
    AttackedJob job(small_with_names("shm", kib));
    expect_training_or_advice(job);
  }
}

TEST_F(SmallDevShm, DoesNotPreventTrainingOverTheDefaultBackend) {
  AttackedJob job(small_with_names("auto"));
  ASSERT_TRUE(job.advances(50)) << job.process().output();
  job.expect_right_results();
}

// --- time

TEST(ClockJumps, CauseNoFalseTimeOutAndNoHang) {
  constexpr auto kPause = 600ms;  // more than two heartbeats
  for (const char* backend : {"shm", "gloo"}) {
    SCOPED_TRACE(backend);
    AttackedJob job({.ranks = 2, .backend = backend, .variables = {{"LD_PRELOAD", SHIFTED_CLOCK}}});
    ASSERT_TRUE(job.advances()) << job.process().output();
    EXPECT_GT(job.control().clock_is_shifted, 0);
    int64_t jumps = 0;
    for (const std::chrono::seconds shift : std::vector<std::chrono::seconds>{5h, -7h, 24h * 30, -1h, 0h}) {
      SCOPED_TRACE("shifted by " + std::to_string(shift.count()) + " s");
      const int64_t held = job.rank(1).held;
      job.control().should_hold = true;  // the other rank waits in a call
      ASSERT_TRUE(eventually([&] { return job.rank(1).held > held; })) << job.process().output();
      job.control().clock_shift_s = shift.count();
      std::this_thread::sleep_for(kPause);  // the length of the wait itself
      job.control().should_hold = false;
      ASSERT_TRUE(job.advances()) << job.process().output();
      ++jumps;
      for (int r = 0; r < job.size(); ++r) EXPECT_EQ(job.rank(r).clock_jumps, jumps) << "rank " << r;
    }
    job.expect_right_results();
  }
}

}  // namespace
}  // namespace lockstep
