#pragma once

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <map>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/failing_rank.h"
#include "support/rank_process.h"
#include "support/slowness.h"
#include "support/stolen_time.h"
#include "support/temporary_folder.h"

namespace lockstep {

/// How a rank of failing_rank ends that was told of an error.
constexpr int kExitAfterError = 3;
/// How a rank ends that was killed.
constexpr int kKilled = 128 + SIGKILL;

/// Ranks of failing_rank, one of which is killed, stopped, late or wrong.
class FailingJob : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (kSlowness == 1)  // sanitizers do not follow a fork
      contained_programs()[FAILING_RANK] = [](const std::vector<std::string>& arguments) {
        return run_failing_rank(arguments.at(0));
      };
  }

  /// Ranks, over shared memory or over TEST_BACKEND, that keep what they write, their secret included, in a folder of
  /// this test.
  JobProcesses job(const std::string& scenario, int world_size, std::map<std::string, std::string> variables = {}) {
    variables.emplace("TEST_BACKEND", backend());
    variables.emplace("XDG_STATE_HOME", folder_.path().string());
    variables.emplace("LOCKSTEP_FLIGHT_DIR", folder_.path().string());
    return {FAILING_RANK, world_size, {scenario}, std::move(variables)};
  }

  static std::string backend() {
    const char* chosen = std::getenv("TEST_BACKEND");
    return chosen ? chosen : "shm";
  }

  TemporaryFolder folder_;
};

inline std::string who(JobProcesses& job, int rank) {
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  return "rank " + std::to_string(rank) + " (pid " + std::to_string(job[rank].pid()) + " on " + host + ")";
}

/// Every rank but one ends with an error of this kind that says all this, and soon.
template <class... Parts>
void expect_survivors_told(JobProcesses& job, int victim, const std::string& kind, std::chrono::milliseconds limit,
                           const Parts&... parts) {
  using namespace std::chrono_literals;
  using testing::HasSubstr;
  const auto begin = std::chrono::steady_clock::now();
  const auto stolen_before = stolen_time();
  for (int rank = 0; rank < job.size(); ++rank) {
    if (rank == victim) continue;
    SCOPED_TRACE("rank " + std::to_string(rank));
    auto line = job[rank].expect_line(kind, 60s);
    auto took = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin);
    std::string me = "rank " + std::to_string(rank);
    EXPECT_THAT(line, testing::AllOf(testing::AnyOf(HasSubstr(me + ":"), HasSubstr("(" + me + " of the job):")),
                                     HasSubstr(parts)...));
    if (victim >= 0) {
      EXPECT_THAT(line, HasSubstr("[culprit: " + std::to_string(victim) + "]"));
    }
    EXPECT_LT(took, limit * kSlowness + (stolen_time() - stolen_before)) << line;
  }
  for (int rank = 0; rank < job.size(); ++rank)
    if (rank != victim) {
      EXPECT_EQ(job[rank].wait(), kExitAfterError);
    }
}

}  // namespace lockstep
