#include "rendezvous/store/coordinator.h"

#include "support/coordinator_test.h"
#include "support/messages.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

using Fields = std::vector<std::string>;
using Connection = Coordinator::Connection;

StoreMessage notice_of(const std::string& message, const std::string& group = "world") {
  return {Verb::kNotice, 0, {group, "PeerError", message}};
}

TEST_F(CoordinatorTest, TellsEveryoneTheFirstCause) {
  join_all();
  report(1, "certain", "first", 1);
  auto messages = heard();
  const auto notice = notice_of("first");
  // The notice before the answer, or the next notice might overtake it in the process of who reports.
  EXPECT_EQ(messages[1], (std::vector{notice, done(1, {"PeerError", "first"})}));
  EXPECT_EQ(messages[2], std::vector{notice});
  EXPECT_EQ(messages[3], std::vector{notice});
  report(2, "certain", "second", 2);
  EXPECT_EQ(answer_to(2), done(2, {"PeerError", "first"}));
  report(3, "symptom", "third", 3);
  EXPECT_EQ(answer_to(3), done(3, {"PeerError", "first"}));
  report(3, "certain", "of another group", 4, "halves");
  EXPECT_EQ(heard()[3],
            (std::vector{notice_of("of another group", "halves"), done(4, {"PeerError", "of another group"})}));
}

TEST_F(CoordinatorTest, AnswersReportsAfterADeathWithTheDeath) {
  join_all();
  lose(2);
  heard();
  for (const std::string certainty : {"certain", "symptom"}) {
    report(1, certainty, "the connection to rank 1 broke", 1);
    EXPECT_THAT(answer_to(1).fields.at(1), HasSubstr("rank 1 (pid 4001 on node1) is gone"));
  }
}

TEST_F(CoordinatorTest, KeepsTheFirstDeathForTheCause) {
  join_all();
  lose(2);
  heard();
  lose(3);  // as a consequence, perhaps
  EXPECT_THAT(heard(), IsEmpty());
  say(1, Verb::kGet, {"never"}, 1);
  EXPECT_THAT(answer_to(1).fields.at(1), HasSubstr("rank 1"));
}

TEST_F(CoordinatorTest, HoldsASymptomUntilTheDeathThatExplainsIt) {
  join_all();
  report(1, "symptom", "the connection to rank 1 broke", 1);
  pass(Coordinator::kDiagnosis - 1ms);
  EXPECT_THAT(heard(), IsEmpty());
  lose(2);
  auto messages = heard();
  ASSERT_EQ(messages[1].size(), 2u);
  EXPECT_EQ(messages[1][0].verb, Verb::kNotice);
  EXPECT_EQ(messages[1][1].verb, Verb::kDone);
  EXPECT_EQ(messages[1][1].id, 1u);
  EXPECT_THAT(messages[1][1].fields,
              ElementsAre("PeerError", HasSubstr("rank 1 (pid 4001 on node1) is gone"), "1", "gone", ""));
  pass(1h);
  EXPECT_THAT(heard()[1], IsEmpty());
}

TEST_F(CoordinatorTest, TakesASymptomForTheCauseWhenNothingFollows) {
  join(1, 0, 1h);
  report(1, "symptom", "first", 1);
  report(2, "symptom", "second", 2);
  report(2, "symptom", "of another group", 3, "halves");
  pass(Coordinator::kDiagnosis);
  auto messages = heard();
  EXPECT_EQ(messages[1].at(0), notice_of("first"));
  EXPECT_EQ(messages[1].at(1), done(1, {"PeerError", "first"}));
  EXPECT_THAT(messages[2], testing::Contains(done(2, {"PeerError", "first"})));
  EXPECT_THAT(messages[2], testing::Contains(done(3, {"PeerError", "of another group"})));
  EXPECT_THAT(messages[3], testing::Contains(StoreMessage{Verb::kNotice, 0, {"world", "PeerError", "first"}}));
}

TEST_F(CoordinatorTest, AnswersASymptomWithTheCertainReportThatFollows) {
  report(1, "symptom", "symptom", 1);
  report(2, "certain", "cause", 2);
  EXPECT_THAT(heard()[1], testing::Contains(done(1, {"PeerError", "cause"})));
}

TEST_F(CoordinatorTest, ForgetsTheSymptomOfOneWhoIsLost) {
  report(1, "symptom", "symptom", 1);
  lose(1);
  pass(1h);
  EXPECT_THAT(heard(), IsEmpty());
}

TEST_F(CoordinatorTest, LetsAnAnnouncedReportGoBeforeSymptoms) {
  join(3, 2, 1h);
  say(1, Verb::kWillReport, {"world"});
  report(2, "symptom", "symptom", 2);
  pass(Coordinator::kAnnounced - 1ms);
  EXPECT_THAT(heard(), IsEmpty());
  report(1, "certain", "cause", 1);
  auto messages = heard();
  EXPECT_EQ(messages[1], (std::vector{notice_of("cause"), done(1, {"PeerError", "cause"})}));
  EXPECT_THAT(messages[2], testing::Contains(done(2, {"PeerError", "cause"})));
  EXPECT_EQ(messages[3].at(0).fields.at(2), "cause");
}

TEST_F(CoordinatorTest, WaitsForAnAnnouncedReportNoLongerThanItMay) {
  say(1, Verb::kWillReport, {"world"});
  report(2, "symptom", "symptom", 2);
  pass(Coordinator::kAnnounced);
  EXPECT_EQ(heard()[2], (std::vector{notice_of("symptom"), done(2, {"PeerError", "symptom"})}));
}

TEST_F(CoordinatorTest, AnnouncesForOneGroupOnly) {
  say(1, Verb::kWillReport, {"halves"});
  report(2, "symptom", "symptom", 2);
  pass(Coordinator::kDiagnosis);
  EXPECT_EQ(heard()[2], (std::vector{notice_of("symptom"), done(2, {"PeerError", "symptom"})}));
}

TEST_F(CoordinatorTest, AsksAllRanksAndGivesTheirAnswers) {
  join_all();
  coordinator_.connected(4);
  heard();
  say(4, Verb::kAsk, {"world", "call 7"}, 9);
  auto questions = heard();
  EXPECT_EQ(questions.size(), 3u);
  for (Connection name : {1, 2, 3}) {
    EXPECT_EQ(questions[name].at(0).verb, Verb::kQuestion);
    EXPECT_THAT(questions[name].at(0).fields, ElementsAre("world", "call 7"));
  }
  const auto id = std::to_string(questions[1].at(0).id);
  say(3, Verb::kAnswer, {id, "not there yet"});
  say(1, Verb::kAnswer, {id, "waiting"});
  say(1, Verb::kAnswer, {id, "again"});     // one answer each
  say(4, Verb::kAnswer, {id, "stranger"});  // of those asked
  EXPECT_THAT(heard(), IsEmpty());
  say(2, Verb::kAnswer, {id, ""});
  EXPECT_EQ(answer_to(4), done(9, {"2", "not there yet", "0", "waiting", "1", ""}));
  say(3, Verb::kAnswer, {id, "too late"});
  EXPECT_THAT(heard(), IsEmpty());
}

TEST_F(CoordinatorTest, AnswersAQuestionWithoutThoseWhoAreTooSlow) {
  join_all();
  say(1, Verb::kAsk, {"world", "call 7"}, 9);
  const auto id = std::to_string(heard()[2].at(0).id);
  say(2, Verb::kAnswer, {id, "waiting"});
  pass(Coordinator::kAnswerLimit - 1ms);
  EXPECT_THAT(heard(), IsEmpty());
  pass(1ms);
  EXPECT_EQ(answer_to(1), done(9, {"1", "waiting"}));
}

TEST_F(CoordinatorTest, AnswersAQuestionWithoutThoseWhoAreLostMeanwhile) {
  join_all();
  say(1, Verb::kAsk, {"world", "call 7"}, 9);
  const auto id = std::to_string(heard()[2].at(0).id);
  say(1, Verb::kAnswer, {id, "waiting"});
  say(2, Verb::kAnswer, {id, "waiting too"});
  lose(3);
  EXPECT_THAT(heard()[1], testing::Contains(done(9, {"0", "waiting", "1", "waiting too"})));
}

TEST_F(CoordinatorTest, AnswersAQuestionAtOnceWhenThereIsNobodyToAsk) {
  say(1, Verb::kAsk, {"world", "call 7"}, 9);
  EXPECT_EQ(answer_to(1), done(9, {}));
}

TEST_F(CoordinatorTest, ForgetsTheQuestionOfOneWhoIsLost) {
  join(2, 1);
  say(1, Verb::kAsk, {"world", "call 7"}, 9);
  const auto id = std::to_string(heard()[2].at(0).id);
  lose(1);
  say(2, Verb::kAnswer, {id, "waiting"});
  EXPECT_THAT(heard(), IsEmpty());
}

TEST_F(CoordinatorTest, HasSignsWhenEveryRankHasAnswered) {
  join_all();
  coordinator_.end_job({ErrorKind::kPeer, "it is over"}, now_);
  coordinator_.request_acknowledgements(now_);
  const auto messages = heard();
  for (Connection rank : {1, 2, 3}) {
    ASSERT_EQ(messages.at(rank).size(), 2u);
    EXPECT_EQ(messages.at(rank)[0].verb, Verb::kNotice) << "first";
    EXPECT_EQ(messages.at(rank)[1].verb, Verb::kQuestion);
    EXPECT_FALSE(coordinator_.all_acknowledged());
    say(rank, Verb::kAnswer, {std::to_string(messages.at(rank)[1].id), ""});
  }
  EXPECT_TRUE(coordinator_.all_acknowledged());
  EXPECT_THAT(heard(), testing::Not(testing::Contains(testing::Key(testing::Ne(0u))))) << "nobody asked";
}

TEST_F(CoordinatorTest, DoesNotWaitForSignsOfThoseWhoAreFrozenOrLost) {
  join_all();
  coordinator_.request_acknowledgements(now_);
  const auto question = std::to_string(heard()[1].at(0).id);
  say(1, Verb::kAnswer, {question, ""});
  lose(2);
  EXPECT_FALSE(coordinator_.all_acknowledged()) << "rank 2 may still answer";
  pass(Coordinator::kAnswerLimit - 1ms);
  EXPECT_FALSE(coordinator_.all_acknowledged());
  pass(1ms);
  EXPECT_TRUE(coordinator_.all_acknowledged());
}

TEST_F(CoordinatorTest, HasSignsAtOnceWhenThereIsNoRank) {
  EXPECT_TRUE(coordinator_.all_acknowledged()) << "none were asked for";
  coordinator_.request_acknowledgements(now_);
  EXPECT_TRUE(coordinator_.all_acknowledged());
}

TEST_F(CoordinatorTest, TellsTheOthersWhoHasLeftAGroup) {
  join_all();
  say(2, Verb::kLeave, {"world", "12", "3", "group/world|"});
  auto messages = heard();
  const StoreMessage left{Verb::kLeft, 0, {"1", "world", "12"}};
  EXPECT_EQ(messages.size(), 2u);
  EXPECT_EQ(messages[1], std::vector{left});
  EXPECT_EQ(messages[3], std::vector{left});
}

TEST_F(CoordinatorTest, ErasesTheKeysOfAGroupOnceAllItsRanksHaveLeft) {
  join_all();
  const auto before = coordinator_.keys();
  for (const auto* key : {"group/a|made/0", "group/a|made/1", "group/a/1|made/0"}) say(1, Verb::kSet, {key, "value"});
  say(1, Verb::kLeave, {"a", "3", "2", "group/a|"});
  say(1, Verb::kLeave, {"a", "3", "2", "group/a|"});  // the same rank again
  EXPECT_EQ(coordinator_.keys(), before + 3);
  say(3, Verb::kLeave, {"a", "3", "2", "group/a|"});
  EXPECT_EQ(coordinator_.keys(), before + 1) << "the key of group a/1";
}

TEST_F(CoordinatorTest, LetsARankGoThatSaysGoodbye) {
  join_all();
  say(2, Verb::kLeaveJob, {"", ""});
  EXPECT_EQ(answer_to(2), StoreMessage{Verb::kClosing});
  EXPECT_EQ(coordinator_.members(), 2u);
  lose(2);
  EXPECT_THAT(heard(), IsEmpty());
}

TEST_F(CoordinatorTest, TellsAllWhyARankGaveUp) {
  join_all();
  say(2, Verb::kLeaveJob, {"TimeoutError", "its data is missing"});
  auto messages = heard();
  for (Connection name : {1, 3})
    EXPECT_THAT(
        messages[name].at(0).fields,
        ElementsAre("", "TimeoutError", "rank 1 (pid 4001 on node1) gave up: its data is missing", "1", "gave up", ""));
  EXPECT_EQ(messages[2].back(), StoreMessage{Verb::kClosing});
}

TEST_F(CoordinatorTest, KeepsHalfAnAnswerToItself) {
  join(1, 0);
  say(2, Verb::kAsk, {"world", "call 7"}, 9);
  const auto id = std::to_string(heard()[1].at(0).id);
  EXPECT_THROW(say(1, Verb::kAnswer, {id}), ProtocolError);
  lose(1);
  EXPECT_THAT(heard()[2], testing::Contains(done(9, {})));
}

TEST_F(CoordinatorTest, TakesARankThatEndsAfterItBlamedAnotherForAConsequence) {
  for (int rank : {0, 1, 2}) join(static_cast<Connection>(rank + 1), rank, 1h);
  say(1, Verb::kBlame, {"TimeoutError", "rank 2 is late", "2", "late", "0"});
  say(2, Verb::kBlame, {"PeerError", "rank 0 is gone", "0", "gone", ""});  // the first counts
  EXPECT_THAT(heard(), IsEmpty()) << "the launcher alone wants to know";
  pass(Coordinator::kConsequence);
  lose(1);
  EXPECT_EQ(coordinator_.first_failure(),
            (Failure{ErrorKind::kTimeout, "rank 2 is late", Culprit{2, CulpritRole::kLate}, 0}));
  EXPECT_THAT(coordinator_.job_failure()->message, HasSubstr("rank 0 (pid 4000 on node0) is gone"));
}

TEST_F(CoordinatorTest, ForgetsABlameThatNobodyEndedFor) {
  join(1, 0, 1h);
  join(2, 1, 1h);
  say(1, Verb::kBlame, {"TimeoutError", "rank 1 is late", "1", "late", ""});
  pass(Coordinator::kConsequence + 1ms);
  lose(1);
  EXPECT_EQ(coordinator_.first_failure()->culprit, (Culprit{0, CulpritRole::kGone}));
  EXPECT_THAT(coordinator_.first_failure()->message, HasSubstr("rank 0 (pid 4000 on node0) is gone"));
}

TEST_F(CoordinatorTest, ForgetsABlameWhenARankJoinsAgain) {
  join(1, 0);
  join(2, 1);
  say(1, Verb::kBlame, {"TimeoutError", "rank 1 is late", "1", "late", ""});
  say(1, Verb::kLeaveJob, {"", ""});
  say(3, Verb::kJoin, {"1/rank/0", "again", "0", "node0", "boot elsewhere", "4000", "5000"}, 7);
  lose(3);
  EXPECT_EQ(coordinator_.first_failure()->culprit, (Culprit{0, CulpritRole::kGone}));
}

TEST_F(CoordinatorTest, HearsNoBlameFromStrangersToTheJob) {
  join(1, 0);
  say(2, Verb::kBlame, {"PeerError", "it is rank 7", "7", "gone", ""});
  lose(1);
  EXPECT_EQ(coordinator_.first_failure()->culprit, (Culprit{0, CulpritRole::kGone}));
}

TEST_F(CoordinatorTest, NamesARankThatGivesUpOnce) {
  join_all();
  say(2, Verb::kLeaveJob, {"TimeoutError", "rank 1: its data is missing"});
  EXPECT_EQ(heard()[1].at(0).fields.at(2), "rank 1 (pid 4001 on node1) gave up: its data is missing");
}

}  // namespace
}  // namespace lockstep
