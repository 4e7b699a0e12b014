// Ranks, launchers and supervisors that are killed at random moments while a job trains.

#include <signal.h>

#include <chrono>
#include <fstream>
#include <iterator>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "attack/attacked_job.h"
#include "support/send_signal.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Start = AttackedJob::Start;

constexpr int kExitAfterError = 3;      // of attacked_rank
constexpr int kExitOfKilledWorker = 4;  // of the launcher
constexpr int kExitOfKilledSupervisor = 70;
constexpr int kKilled = 128 + SIGKILL;
constexpr auto kNoticeLimit = 400ms;

/// Executes a rank that has a child in a session of its own, which only a launcher can find.
const std::vector<std::string> kWithChild{"sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & exec \"$@\"", "rank"};

/// Not a wait for an event: the moment of the kill is another one each time.
void wait_for_a_random_moment(std::mt19937& random) {
  std::this_thread::sleep_for(std::chrono::microseconds(random() % 200'000));
}

int parent_of(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string line{std::istreambuf_iterator<char>(file), {}};
  return std::atoi(line.substr(line.rfind(')') + 4).c_str());
}

/// The rank that the launcher's report blames; -1: none.
int blamed_rank(const std::string& output) {
  const auto reports = lines_after(output, "{");
  if (reports.empty()) return -1;
  const auto report = nlohmann::json::parse("{" + reports.back());
  return report["culprit"].is_null() ? -1 : report["culprit"]["rank"].get<int>();
}

class Kills : public testing::Test {
 protected:
  AttackedJob::Options random_job() {
    return {.ranks = 2 + static_cast<int>(random_() % 2),
            .backend = random_() % 2 == 0 ? "shm" : "gloo",
            .start = random_() % 2 == 0 ? Start::kByLauncher : Start::kDirectly,
            .around_rank = kWithChild};
  }

  /// Every survivor gets an error that names the victim, in time.
  void expect_survivors_told(AttackedJob& job, int victim, Clock::time_point killed_at) {
    for (int r = 0; r < job.size(); ++r) {
      if (r == victim) continue;
      SCOPED_TRACE("survivor " + std::to_string(r));
      ASSERT_TRUE(eventually([&] { return job.rank(r).outcome != RankOutcome::kNone; }));
      EXPECT_EQ(job.rank(r).outcome, RankOutcome::kPeerError);
      EXPECT_EQ(job.rank(r).culprit, victim);
      const Clock::time_point told_at{std::chrono::nanoseconds(job.rank(r).told_at_ns)};
      EXPECT_LT(told_at - killed_at, kNoticeLimit);
      slowest_ = std::max(slowest_, told_at - killed_at);
    }
  }

  /// The launcher's report, or the exit codes of the ranks.
  static void expect_ends(AttackedJob& job, const AttackedJob::Options& options, int victim) {
    if (options.start == Start::kByLauncher) {
      EXPECT_EQ(job.process().wait(), kExitOfKilledWorker) << job.process().output();
      EXPECT_EQ(blamed_rank(job.process().output()), victim) << job.process().output();
      return;
    }
    for (int r = 0; r < job.size(); ++r)
      EXPECT_EQ(job.process(r).wait(), r == victim ? kKilled : kExitAfterError) << job.process(r).output();
  }

  /// Kills the process that `find` returns, in 20 jobs, and expects that no process and no file is left.
  template <class Find>
  void kill_in_20_jobs(int launcher_exit, Find&& find) {
    for (int kill = 0; kill < 20 && !HasFailure(); ++kill) {
      SCOPED_TRACE("kill " + std::to_string(kill));
      AttackedJob job({.ranks = 2, .backend = kill % 2 == 0 ? "shm" : "gloo", .around_rank = kWithChild});
      ASSERT_TRUE(job.advances()) << job.process().output();
      job.control().should_hold = kill % 4 < 2;  // outside of calls a rank does not notice that its launcher is gone
      wait_for_a_random_moment(random_);
      const auto killed_at = Clock::now();
      ASSERT_TRUE(send_signal(find(job), SIGKILL));
      job.expect_nothing_left();
      slowest_ = std::max(slowest_, Clock::now() - killed_at);
      EXPECT_EQ(job.process().wait(), launcher_exit) << job.process().output();
      for (int r = 0; r < job.size(); ++r) EXPECT_NE(job.rank(r).outcome, RankOutcome::kWrongResult);
    }
    print_slowest("gone");
  }

  void print_slowest(const char* event) const {
    std::cout << event << " after " << std::chrono::duration<double, std::milli>(slowest_).count() << " ms at most\n";
  }

  std::mt19937 random_ = attack_random();
  Clock::duration slowest_{};
};

TEST_F(Kills, OfRanksAreNamedByAllSurvivorsWithin400Milliseconds) {
  for (int kill = 0; kill < 60 && !HasFailure(); ++kill) {
    const auto options = random_job();
    const int victim = static_cast<int>(random_() % static_cast<unsigned>(options.ranks));
    SCOPED_TRACE("kill " + std::to_string(kill) + " of rank " + std::to_string(victim) + " of " +
                 std::to_string(options.ranks) + " over " + options.backend +
                 (options.start == Start::kByLauncher ? " by the launcher" : " started directly"));
    AttackedJob job(options);
    ASSERT_TRUE(job.advances()) << job.process().output();
    wait_for_a_random_moment(random_);
    const auto killed_at = Clock::now();
    ASSERT_TRUE(send_signal(job.pid(victim), SIGKILL));
    expect_survivors_told(job, victim, killed_at);
    expect_ends(job, options, victim);
    job.expect_nothing_left();
  }
  print_slowest("told");
}

TEST_F(Kills, OfTheLauncherLeaveNoRankAndNoFile) {
  kill_in_20_jobs(kKilled, [](AttackedJob& job) { return job.process().pid(); });
}

TEST_F(Kills, OfTheSupervisorLeaveNoRankAndNoFile) {
  kill_in_20_jobs(kExitOfKilledSupervisor, [](AttackedJob& job) {
    const int supervisor = parent_of(job.pid(0));
    EXPECT_EQ(parent_of(supervisor), job.process().pid()) << "the supervisor is a child of the launcher";
    return supervisor;
  });
}

}  // namespace
}  // namespace lockstep
