// How the state of a job is judged from its live files: without files and processes.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tools/live_samples.h"

namespace lockstep::live {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;
using testing::StartsWith;

const Json kRunning = Json::object();
const Json kKilled{{"state", "ended"}, {"failed", true}, {"how", "killed by SIGKILL"}};

std::vector<int64_t> stragglers(const JobView& job) {
  std::vector<int64_t> result;
  for (const auto& rank : job.ranks)
    if (rank.is_straggler) result.push_back(rank.rank);
  return result;
}

std::vector<RankState> states(const JobView& job) {
  std::vector<RankState> result;
  for (const auto& rank : job.ranks) result.push_back(rank.state);
  return result;
}

JobView four_ranks(const std::vector<Json>& changes, const std::vector<Json>& nodes = {}) {
  std::vector<Json> ranks;
  for (size_t i = 0; i < 4; ++i)
    ranks.push_back(rank_json(static_cast<int64_t>(i), i < changes.size() ? changes[i] : Json::object()));
  return make_job_view(files_of(ranks, nodes), kNow);
}

TEST(JobView, SumsUpARunningJob) {
  const auto job = four_ranks({{{"step", 101}, {"batch", 51}}});
  EXPECT_EQ(job.job, "job-1");
  EXPECT_TRUE(job.is_live);
  EXPECT_EQ(job.state, RankState::kRunning);
  EXPECT_EQ(job.world_size, 4);
  EXPECT_EQ(job.step, 101);
  EXPECT_EQ(job.batch, 51);
  EXPECT_EQ(job.epochs, 20);
  EXPECT_DOUBLE_EQ(job.samples_per_second.value(), 4 * 320.0);
  EXPECT_DOUBLE_EQ(job.elapsed, 60);
  EXPECT_EQ(job.report, "");
  ASSERT_THAT(job.ranks, SizeIs(4));
  EXPECT_EQ(job.ranks[3].pid, 1003);
  EXPECT_EQ(job.ranks[3].note, "");
  EXPECT_DOUBLE_EQ(job.ranks[3].age, 0.5);
  EXPECT_THAT(stragglers(job), IsEmpty());
}

TEST(JobView, BelievesARankThatSaysHowItEnded) {
  const auto job =
      four_ranks({{{"state", "finished"}},
                  {{"state", "stopped"}},
                  {{"state", "failed"}, {"failure", {{"kind", "PeerError"}, {"message", "rank 3 is gone\nmore"}}}},
                  {{"state", "failed"}}});
  EXPECT_THAT(states(job),
              ElementsAre(RankState::kFinished, RankState::kStopped, RankState::kFailed, RankState::kFailed));
  EXPECT_EQ(job.ranks[2].note, "PeerError: rank 3 is gone");
  EXPECT_FALSE(job.is_live);
  EXPECT_EQ(job.state, RankState::kFailed);
  EXPECT_EQ(job.report, "rank 3: failed") << "a PeerError is a consequence";
}

TEST(JobView, BelievesALauncherThatSawAWorkerEnd) {
  const auto job =
      four_ranks({}, {node_json({worker_json(0), worker_json(1, kKilled), worker_json(2, {{"state", "ended"}}),
                                 worker_json(3, {{"state", "ended"},
                                                 {"failed", true},
                                                 {"how", "exit code 1"},
                                                 {"uncaught", "std::runtime_error: bad sample 17"}})})});
  EXPECT_THAT(states(job),
              ElementsAre(RankState::kRunning, RankState::kFailed, RankState::kFinished, RankState::kFailed));
  EXPECT_EQ(job.ranks[1].note, "killed by SIGKILL");
  EXPECT_EQ(job.ranks[3].note, "std::runtime_error: bad sample 17");
  EXPECT_EQ(job.state, RankState::kFailed);
  EXPECT_TRUE(job.is_live) << "rank 0 still runs";
}

TEST(JobView, KeepsThePreemptionOfARankWhoseWorkerEnded) {
  const auto job = four_ranks({{{"state", "stopped"}}}, {node_json({worker_json(0, {{"state", "ended"}})})});
  EXPECT_EQ(job.ranks[0].state, RankState::kStopped);
}

TEST(JobView, CallsAnOldFileSilent) {
  const auto job = four_ranks({{{"updated", kNow - 12}}, {{"updated", kNow - 4.9}}, {{"updated", kNow - 7200}}});
  EXPECT_THAT(states(job),
              ElementsAre(RankState::kSilent, RankState::kRunning, RankState::kSilent, RankState::kRunning));
  EXPECT_EQ(job.ranks[0].note, "no news for 12 s");
  EXPECT_EQ(job.ranks[2].note, "no news for 2 h");
  const auto dead = make_job_view(files_of({rank_json(0, {{"updated", kNow - 100}, {"world_size", 1}})}), kNow);
  EXPECT_FALSE(dead.is_live);
  EXPECT_EQ(dead.state, RankState::kSilent);
  EXPECT_DOUBLE_EQ(dead.elapsed, 0) << "started after the last news: clocks differ";
}

TEST(JobView, TreatsAFileFromTheFutureAsFresh) {
  const auto job = four_ranks({{{"updated", kNow + 3600}, {"started", kNow + 3000}}});
  EXPECT_EQ(job.ranks[0].state, RankState::kRunning);
  EXPECT_EQ(job.ranks[0].age, 0);
  EXPECT_THAT(job.ranks, SizeIs(4));
}

TEST(JobView, SaysInWhichCallARankBlocks) {
  EXPECT_EQ(four_ranks({{{"call", call_json(5.2)}}}).ranks[0].note, "in all_reduce for 5 s");
  EXPECT_EQ(four_ranks({{{"call", call_json(300)}}}).ranks[0].note, "in all_reduce for 5 min");
}

TEST(JobView, ListsRanksWithoutAFile) {
  const auto node = node_json({worker_json(0), worker_json(1), worker_json(2, kKilled)});
  const auto job = make_job_view(files_of({rank_json(0)}, {node}), kNow);
  EXPECT_THAT(states(job),
              ElementsAre(RankState::kRunning, RankState::kRunning, RankState::kFailed, RankState::kSilent));
  EXPECT_EQ(job.ranks[1].note, "no file yet");
  EXPECT_EQ(job.ranks[1].pid, 1001);
  EXPECT_EQ(job.ranks[1].host, "node0");
  EXPECT_FALSE(job.ranks[1].has_file);
  EXPECT_EQ(job.ranks[2].note, "killed by SIGKILL");
  EXPECT_EQ(job.ranks[3].note, "no file yet") << "of another node";
}

TEST(JobView, SaysThatAFileCannotBeRead) {
  auto files = files_of({rank_json(0), rank_json(1), rank_json(2)});
  files.unreadable_ranks[3] = "it is empty";
  EXPECT_EQ(make_job_view(files, kNow).ranks.at(3).note, "its live file cannot be read");
  LiveFiles only;
  only.unreadable_ranks[0] = "it is empty";
  const auto job = make_job_view(only, kNow);
  ASSERT_THAT(job.ranks, SizeIs(1));
  EXPECT_EQ(job.ranks[0].state, RankState::kSilent);
  EXPECT_FALSE(job.is_live);
}

TEST(JobView, IgnoresFilesOfEarlierStarts) {
  const Json earlier{{"job", "job-0"}, {"started", kNow - 900}, {"state", "failed"}};
  auto job = make_job_view(files_of({rank_json(0), rank_json(1, earlier), rank_json(7, earlier)}), kNow);
  ASSERT_THAT(job.ranks, SizeIs(4)) << "not the rank 7 of the earlier job";
  EXPECT_EQ(job.job, "job-1");
  EXPECT_EQ(job.ranks[1].note, "no file yet");

  const auto node = node_json({worker_json(0, kKilled), worker_json(1)}, {{"attempt", 2}, {"started", kNow - 300}});
  job = make_job_view(
      files_of({rank_json(0, {{"attempt", 3}}), rank_json(1, {{"attempt", 2}, {"state", "failed"}})}, {node}), kNow);
  EXPECT_EQ(job.attempt, 3);
  EXPECT_EQ(job.ranks[0].state, RankState::kRunning) << "the worker of the attempt before was killed";
  EXPECT_EQ(job.ranks[1].note, "no file yet");
  EXPECT_THAT(job.nodes, SizeIs(1)) << "the launcher is still that of the job";

  job = make_job_view(
      files_of({rank_json(0, {{"attempt", 2}, {"state", "failed"}}), rank_json(1, {{"attempt", 3}})}, {node}), kNow);
  EXPECT_EQ(job.attempt, 3) << "whatever the order of the files";
  EXPECT_EQ(job.ranks[0].note, "no file yet");
  EXPECT_EQ(job.ranks[1].state, RankState::kRunning);
}

TEST(JobView, DoesNotListRanksOfAnAbsurdJob) {
  const auto job = make_job_view(files_of({rank_json(0, {{"world_size", 1000000000000}})}), kNow);
  EXPECT_THAT(job.ranks, SizeIs(1));
}

TEST(JobView, ReportsWhatTheLauncherFound) {
  const Json report{{"exit_code", 4},
                    {"culprit",
                     {{"rank", 1},
                      {"host", "node0"},
                      {"pid", 1001},
                      {"how", "killed by SIGABRT (Aborted)"},
                      {"uncaught", "std::runtime_error: bad sample 17"}}},
                    {"remedy", "see the exception above"}};
  const auto job = four_ranks({}, {node_json({worker_json(1, kKilled)}, {{"state", "ended"}, {"report", report}})});
  EXPECT_EQ(job.report,
            "rank 1 (pid 1001 on node0) failed first: killed by SIGABRT (Aborted); uncaught std::runtime_error: bad "
            "sample 17. What to do: see the exception above");
  EXPECT_EQ(job.nodes.at(0).state, RankState::kFailed);
  const auto success = four_ranks({}, {node_json({}, {{"state", "ended"}, {"report", {{"exit_code", 0}}}})});
  EXPECT_EQ(success.report, "");
  EXPECT_EQ(success.nodes.at(0).state, RankState::kFinished);
}

TEST(JobView, LooksForTheCauseBehindPeerErrors) {
  const Json peer{{"state", "failed"}, {"failure", {{"kind", "PeerError"}, {"message", "rank 3 is gone"}}}};
  const Json cause{{"state", "failed"}, {"failure", {{"kind", "MismatchError"}, {"message", "ranks disagree"}}}};
  EXPECT_EQ(four_ranks({peer, peer, cause, peer}).report, "rank 2: MismatchError: ranks disagree");
  EXPECT_EQ(four_ranks({peer, peer, cause}, {node_json({worker_json(3, kKilled)})}).report,
            "rank 3: killed by SIGKILL");
  EXPECT_EQ(four_ranks({peer}).report, "rank 0: PeerError: rank 3 is gone");
}

TEST(JobView, RemovesControlCharactersFromNotes) {
  const Json failure{{"state", "failed"}, {"failure", {{"kind", "Error"}, {"message", "a\033[31m red\a\tword"}}}};
  EXPECT_EQ(four_ranks({failure}).ranks[0].note, "Error: a red  word");
}

// --- stragglers

TEST(LiveStraggler, IsTheRankThatWaitsLeast) {
  EXPECT_THAT(
      stragglers(four_ranks({communication(0.5), communication(0.52), communication(0.1), communication(0.48)})),
      ElementsAre(2));
  EXPECT_THAT(stragglers(four_ranks({communication(0.5), communication(0.5), communication(0.36), communication(0.5)})),
              IsEmpty());
  EXPECT_THAT(stragglers(four_ranks({communication(0.5), communication(0.5), communication(0.35), communication(0.5)})),
              ElementsAre(2));
  const auto job = four_ranks({communication(0.5), communication(0.05), communication(0.5), communication(0.5)});
  EXPECT_EQ(job.ranks[1].note, "the others wait for it");
}

TEST(LiveStraggler, IsComparedWithTheMedianOfTheOthers) {
  // One rank that waits long does not make a straggler of the others.
  EXPECT_THAT(
      stragglers(four_ranks({communication(0.1), communication(0.12), communication(0.12), communication(0.9)})),
      IsEmpty());
  const auto two = make_job_view(files_of({rank_json(0, {{"world_size", 2}, {"time", {{"communication", 0.4}}}}),
                                           rank_json(1, {{"world_size", 2}, {"time", {{"communication", 0.1}}}})}),
                                 kNow);
  EXPECT_THAT(stragglers(two), ElementsAre(1));
}

TEST(LiveStraggler, NeedsTwoRanksWithKnownShares) {
  const Json unknown{{"time", {{"communication", nullptr}}}};
  EXPECT_THAT(stragglers(four_ranks({unknown, unknown, unknown, communication(0)})), IsEmpty());
  EXPECT_THAT(stragglers(four_ranks({unknown, unknown, communication(0.5), communication(0)})), ElementsAre(3));
  EXPECT_THAT(
      stragglers(make_job_view(files_of({rank_json(0, {{"world_size", 1}, {"time", {{"communication", 0}}}})}), kNow)),
      IsEmpty());
}

TEST(LiveStraggler, IsNoRankThatHasEnded) {
  Json ended = communication(0);
  ended["state"] = "finished";
  EXPECT_THAT(stragglers(four_ranks({ended})), IsEmpty());
  ended["state"] = "failed";
  EXPECT_THAT(
      stragglers(four_ranks({ended, {{"call", call_json(3)}}, {{"call", call_json(3)}}, {{"call", call_json(3)}}})),
      IsEmpty());
}

TEST(LiveStraggler, IsTheOnlyRankBehindWhileAllOthersBlock) {
  const Json blocked{{"call", call_json(0.6)}};
  const Json behind{{"step", 99}};
  EXPECT_THAT(stragglers(four_ranks({blocked, behind, blocked, blocked})), ElementsAre(1));
  EXPECT_THAT(stragglers(four_ranks({blocked, behind, blocked, kRunning})), IsEmpty()) << "one does not block";
  EXPECT_THAT(stragglers(four_ranks({blocked, behind, behind, blocked})), IsEmpty()) << "two are behind";
  EXPECT_THAT(stragglers(four_ranks({blocked, {{"step", 101}}, blocked, blocked})), IsEmpty()) << "it is ahead";
}

TEST(LiveStraggler, IsTheOnlyRankThatDoesNotBlockForLong) {
  const Json blocked{{"call", call_json(2.5)}};
  EXPECT_THAT(stragglers(four_ranks({blocked, blocked, kRunning, blocked})), ElementsAre(2));
  const Json shortly{{"call", call_json(0.6)}};
  EXPECT_THAT(stragglers(four_ranks({shortly, shortly, kRunning, shortly})), IsEmpty()) << "files of different ages";
  EXPECT_THAT(stragglers(four_ranks({blocked, blocked, blocked, blocked})), IsEmpty());
}

TEST(LiveStraggler, IsASilentRankWhileOthersBlock) {
  const Json silent{{"updated", kNow - 12}, {"time", {{"communication", 0.9}}}};
  auto job = four_ranks({{{"call", call_json(8)}}, silent, {{"call", call_json(8)}}, {{"call", call_json(8)}}});
  EXPECT_THAT(stragglers(job), ElementsAre(1));
  EXPECT_EQ(job.ranks[1].note, "no news for 12 s");
  EXPECT_THAT(stragglers(four_ranks({kRunning, silent})), IsEmpty()) << "nobody waits";
  EXPECT_THAT(stragglers(four_ranks({silent, silent, silent, silent})), IsEmpty()) << "the job is over";
}

}  // namespace
}  // namespace lockstep::live
