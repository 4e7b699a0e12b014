#include "rendezvous/store/coordinator.h"

#include <limits>

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

TEST_F(CoordinatorTest, WelcomesWithTheNameOfTheHost) {
  coordinator_.connected(4);
  EXPECT_EQ(answer_to(4), (StoreMessage{Verb::kWelcome, 0, {"rank 0", "node0", "boot", "4000", "0"}}));
}

TEST_F(CoordinatorTest, CallsTheProcessesOfALaunchersStoreLaunchers) {
  Coordinator launchers({"the launcher of node 0", {"node0", "boot", 4000}}, Coordinator::Members::kLaunchers);
  launchers.connected(1);
  launchers.received(1, {Verb::kJoin, 1, {"node/2", "here", "2", "node2", "boot", "4002", "5000"}}, now_);
  launchers.lost(1, "its connection was closed", now_);
  EXPECT_EQ(launchers.job_failure()->message,
            "the launcher of node 2 (pid 4002 on node2) is gone: its connection was closed");
}

TEST_F(CoordinatorTest, AnswersEveryRequestWithItsId) {
  say(1, Verb::kSet, {"key", "value"}, 11);
  EXPECT_EQ(answer_to(1), done(11, {}));
  say(2, Verb::kGet, {"key"}, 12);
  EXPECT_EQ(answer_to(2), done(12, {"value"}));
  say(2, Verb::kGet, {}, 13);
  EXPECT_EQ(answer_to(2), done(13, {}));
  say(2, Verb::kAdd, {"n", "5"}, 14);
  EXPECT_EQ(answer_to(2), done(14, {"5"}));
  say(3, Verb::kAdd, {"n", "-7"}, 15);
  EXPECT_EQ(answer_to(3), done(15, {"-2"}));
  say(3, Verb::kCompareSet, {"key", "other", "x"}, 16);
  EXPECT_EQ(answer_to(3), done(16, {"value"}));
  say(3, Verb::kCompareSet, {"key", "value", "x"}, 17);
  EXPECT_EQ(answer_to(3), done(17, {"x"}));
  say(3, Verb::kCompareSet, {"none", "y", "x"}, 18);
  EXPECT_EQ(answer_to(3), done(18, {""}));
  say(3, Verb::kCheck, {"key", "n"}, 19);
  EXPECT_EQ(answer_to(3), done(19, {"1"}));
  say(3, Verb::kCheck, {"key", "none"}, 20);
  EXPECT_EQ(answer_to(3), done(20, {"0"}));
  say(3, Verb::kErase, {"key"}, 21);
  EXPECT_EQ(answer_to(3), done(21, {"1"}));
  say(3, Verb::kErase, {"key"}, 22);
  EXPECT_EQ(answer_to(3), done(22, {"0"}));
  say(3, Verb::kAppend, {"log", "a"}, 23);
  EXPECT_EQ(answer_to(3), done(23, {}));
  say(2, Verb::kAppend, {"log", "b"}, 24);
  EXPECT_EQ(answer_to(2), done(24, {}));
  say(2, Verb::kMultiSet, {"x", "1", "y", "2", "x", "3"}, 25);
  EXPECT_EQ(answer_to(2), done(25, {}));
  say(2, Verb::kMultiSet, {}, 26);
  EXPECT_EQ(answer_to(2), done(26, {}));
  say(1, Verb::kGet, {"y", "log", "x"}, 27);
  EXPECT_EQ(answer_to(1), done(27, {"2", "ab", "3"}));
}

TEST_F(CoordinatorTest, AnswersThoseWhoWaitOnceAllTheirKeysAreThere) {
  say(1, Verb::kGet, {"a", "b"}, 1);
  say(2, Verb::kGet, {"b"}, 2);
  pass(1h);
  EXPECT_THAT(heard(), IsEmpty());
  say(3, Verb::kSet, {"b", "B"}, 3);
  EXPECT_EQ(heard()[2], std::vector{done(2, {"B"})});
  say(3, Verb::kCompareSet, {"a", "", "A"}, 4);
  EXPECT_EQ(heard()[1], std::vector{done(1, {"A", "B"})});
  say(3, Verb::kSet, {"a", "again"}, 5);
  EXPECT_EQ(answer_to(3), done(5, {}));  // who was answered waits no more
}

TEST_F(CoordinatorTest, WakesThoseWhoWaitForAnAppendedValueOrForSeveral) {
  say(1, Verb::kGet, {"log"}, 1);
  say(2, Verb::kAppend, {"log", "a"}, 2);
  EXPECT_EQ(heard()[1], std::vector{done(1, {"a"})});
  say(1, Verb::kGet, {"x", "y"}, 3);
  say(1, Verb::kGet, {"y"}, 4);
  say(2, Verb::kMultiSet, {"x", "1", "y", "2"}, 5);
  EXPECT_EQ(heard()[1], (std::vector{done(3, {"1", "2"}), done(4, {"2"})}));
  say(1, Verb::kGet, {"z"}, 6);
  say(2, Verb::kMultiSet, {"z", "first", "z", "last"}, 7);
  EXPECT_EQ(heard()[1], std::vector{done(6, {"last"})});  // never a value in between
}

// What cannot be answered is refused before it is copied, and before it is stored.
TEST_F(CoordinatorTest, RefusesAnswersThatNoMessageCanCarry) {
  const std::string mebibyte(1 << 20, 'x');
  say(1, Verb::kSet, {"large", mebibyte}, 1);
  heard();
  say(1, Verb::kGet, Fields(63, "large"), 2);
  EXPECT_EQ(answer_to(1), done(2, Fields(63, mebibyte)));
  say(1, Verb::kGet, Fields(64, "large"), 3);
  const auto refused = answer_to(1);
  EXPECT_EQ(refused.verb, Verb::kRefused);
  EXPECT_EQ(refused.id, 3u);
  EXPECT_THAT(refused.fields, ElementsAre(AllOf(HasSubstr("64 requested keys"), HasSubstr("67108864 bytes"),
                                                HasSubstr("64 MiB"), HasSubstr("fewer keys"))));
}

TEST_F(CoordinatorTest, RefusesToAppendToAValueThatIsTooLargeForAnAnswer) {
  const size_t most = Decoder::kMaxBytes - 9 - 4;
  say(1, Verb::kSet, {"log", std::string(most - 2, 'x')}, 1);
  heard();
  say(1, Verb::kAppend, {"log", "abc"}, 2);
  const auto refused = answer_to(1);
  EXPECT_EQ(refused.verb, Verb::kRefused);
  EXPECT_THAT(refused.fields, ElementsAre(AllOf(HasSubstr("3 bytes"), HasSubstr("'log'"), HasSubstr("64 MiB"))));
  say(1, Verb::kAppend, {"log", "ab"}, 3);
  EXPECT_EQ(answer_to(1), done(3, {}));
  say(1, Verb::kGet, {"log"}, 4);
  const auto whole = answer_to(1);
  EXPECT_EQ(whole.verb, Verb::kDone);
  EXPECT_EQ(whole.fields.at(0).size(), most);
  EXPECT_NO_THROW(encode(whole));
}

TEST_F(CoordinatorTest, WakesThoseWhoWaitForANumberOrARank) {
  say(1, Verb::kGet, {"n"}, 1);
  say(2, Verb::kAdd, {"n", "3"}, 2);
  EXPECT_EQ(heard()[1], std::vector{done(1, {"3"})});
  say(1, Verb::kGet, {"rank/1"}, 3);
  say(2, Verb::kJoin, {"rank/1", "here", "1", "node1", "id", "4001", "5000"}, 4);
  EXPECT_EQ(heard()[1], std::vector{done(3, {"here"})});
}

TEST_F(CoordinatorTest, TellsOneWhoGivesUpWhatIsMissing) {
  say(1, Verb::kSet, {"a", "A"}, 1);
  say(1, Verb::kGet, {"a", "b", "c"}, 2);
  say(2, Verb::kGet, {"b"}, 2);
  heard();
  say(1, Verb::kCancel, {"2"});
  EXPECT_EQ(answer_to(1), (StoreMessage{Verb::kLate, 2, {"b", "c"}}));
  say(3, Verb::kSet, {"b", "B"}, 3);
  auto messages = heard();
  EXPECT_EQ(messages[2], std::vector{done(2, {"B"})});  // another's request of the same number still waits
  EXPECT_THAT(messages[1], IsEmpty());
}

TEST_F(CoordinatorTest, IsNotConfusedByOneWhoGivesUpAfterTheAnswer) {
  say(1, Verb::kSet, {"a", "A"}, 1);
  say(1, Verb::kGet, {"a"}, 2);
  heard();
  say(1, Verb::kCancel, {"2"});
  say(1, Verb::kCancel, {"777"});
  EXPECT_THAT(heard(), IsEmpty());
}

TEST_F(CoordinatorTest, ForgetsWhatALostConnectionWaitedFor) {
  say(1, Verb::kGet, {"a"}, 1);
  lose(1);
  say(2, Verb::kSet, {"a", "A"}, 2);
  EXPECT_EQ(answer_to(2), done(2, {}));
}

TEST_F(CoordinatorTest, RefusesToAddToWhatIsNoNumber) {
  say(1, Verb::kSet, {"word", "five"}, 1);
  heard();
  say(1, Verb::kAdd, {"word", "1"}, 2);
  auto answer = answer_to(1);
  EXPECT_EQ(answer.verb, Verb::kRefused);
  EXPECT_EQ(answer.id, 2u);
  EXPECT_THAT(answer.fields, ElementsAre(AllOf(HasSubstr("word"), HasSubstr("five"))));
}

TEST_F(CoordinatorTest, RefusesASumThatIsTooLarge) {
  const auto most = std::to_string(std::numeric_limits<int64_t>::max());
  say(1, Verb::kAdd, {"n", most}, 1);
  EXPECT_EQ(answer_to(1), done(1, {most}));
  say(1, Verb::kAdd, {"n", "1"}, 2);
  EXPECT_EQ(answer_to(1).verb, Verb::kRefused);
  say(1, Verb::kGet, {"n"}, 3);
  EXPECT_EQ(answer_to(1), done(3, {most}));
}

TEST_F(CoordinatorTest, GivesARankToTheFirstWhoClaimsIt) {
  say(1, Verb::kJoin, {"rank/0", "first", "0", "node0", "id", "4000", "5000"}, 1);
  EXPECT_EQ(answer_to(1), done(1, {"first"}));
  EXPECT_EQ(coordinator_.members(), 1u);
  say(2, Verb::kJoin, {"rank/0", "second", "0", "node1", "id", "4001", "5000"}, 2);
  EXPECT_EQ(answer_to(2), done(2, {"first"}));
  EXPECT_EQ(coordinator_.members(), 1u);
  lose(2);  // who has no rank may go
  EXPECT_THAT(heard(), IsEmpty());
}

TEST_F(CoordinatorTest, TellsAllWhichRankIsLostAndWhatItWasDoing) {
  join_all();
  coordinator_.connected(4);
  heard();
  say(4, Verb::kGet, {"never"}, 7);
  say(2, Verb::kBeat, {"in all_reduce 12", ""});
  EXPECT_EQ(answer_to(2).verb, Verb::kHeartbeatReply);
  now_ += 250ms;
  lose(2);
  auto messages = heard();
  EXPECT_EQ(coordinator_.members(), 2u);
  EXPECT_THAT(messages[2], IsEmpty());
  for (Connection name : {1, 3, 4}) {
    const auto& notice = messages[name].at(0);
    EXPECT_EQ(notice.verb, Verb::kNotice);
    ASSERT_EQ(notice.fields.size(), 6u);
    EXPECT_EQ(notice.fields[0], "");
    EXPECT_EQ(notice.fields[1], "PeerError");
    EXPECT_THAT(notice.fields[2],
                AllOf(HasSubstr("rank 1"), HasSubstr("pid 4001 on node1"), HasSubstr("its connection was closed"),
                      HasSubstr("0.25 s earlier"), HasSubstr("in all_reduce 12")));
    EXPECT_EQ(notice.fields[3], "1");
    EXPECT_EQ(notice.fields[4], "gone");
  }
  const auto& failure = messages[4].at(1);
  EXPECT_EQ(failure.verb, Verb::kFailed);
  EXPECT_EQ(failure.id, 7u);
  EXPECT_THAT(failure.fields, ElementsAre("PeerError", HasSubstr("rank 1"), "1", "gone", ""));
}

TEST_F(CoordinatorTest, RemembersTheLastThatARankSaidItWasDoing) {
  join_all();
  now_ += 20ms;
  say(2, Verb::kBeat, {"", ""});  // it has begun nothing yet
  lose(2);
  EXPECT_THAT(heard()[1].at(0).fields.at(2), HasSubstr("It had joined 0.02 s earlier, and had not reported"));
}

TEST_F(CoordinatorTest, AnswersLateComersOfAFailedJobAtOnce) {
  join_all();
  say(1, Verb::kSet, {"there", "value"}, 1);
  lose(2);
  heard();
  say(1, Verb::kGet, {"never"}, 2);
  EXPECT_EQ(answer_to(1).verb, Verb::kFailed);
  say(1, Verb::kGet, {"there"}, 3);
  EXPECT_EQ(answer_to(1), done(3, {"value"}));
  coordinator_.connected(4);
  heard();
  say(4, Verb::kJoin, {"rank/3", "here", "3", "node3", "id", "4003", "5000"}, 4);
  EXPECT_EQ(answer_to(4).verb, Verb::kFailed);
  EXPECT_EQ(coordinator_.members(), 2u);
}

TEST_F(CoordinatorTest, NamesARankThatIsSilentBeyondItsLimit) {
  join(1, 0, 5s);
  join(2, 1, 2s);
  say(2, Verb::kBeat, {"in broadcast 3", ""});
  heard();
  pass(1999ms);
  EXPECT_THAT(heard(), IsEmpty());
  pass(1ms);
  auto notice = heard()[1].at(0);
  EXPECT_EQ(notice.verb, Verb::kNotice);
  EXPECT_THAT(notice.fields.at(2),
              AllOf(HasSubstr("rank 1"), HasSubstr("sent no heartbeat for 2 s"),
                    HasSubstr("Last activity, 2 s earlier: in broadcast 3"), HasSubstr("stopped")));
  EXPECT_EQ(notice.fields.at(4), "silent");
  EXPECT_EQ(coordinator_.first_failure()->culprit, (Culprit{1, CulpritRole::kSilent}));
  pass(10s);
  EXPECT_THAT(heard(), IsEmpty());  // once is enough
}

TEST_F(CoordinatorTest, TakesAnyMessageForASignOfLife) {
  join(1, 0, 2s);
  for (int round = 0; round < 5; ++round) {
    pass(1900ms);
    say(1, Verb::kCheck, {"key"}, 1);
    EXPECT_EQ(answer_to(1).verb, Verb::kDone);
  }
}

TEST_F(CoordinatorTest, DoesNotMissARankThatADebuggerHolds) {
  join(1, 0, 2s);
  say(1, Verb::kBeat, {"in step 1", "traced"});
  heard();
  pass(1h);
  EXPECT_THAT(heard(), IsEmpty());
  say(1, Verb::kBeat, {"in step 1", ""});
  heard();
  pass(2s);
  EXPECT_EQ(heard()[1].at(0).verb, Verb::kNotice);
}

TEST_F(CoordinatorTest, ExcusesTheSilenceThatItsOwnSleepCaused) {
  join(1, 0, 2s);
  now_ += 1h;
  coordinator_.reset_heartbeats(now_);
  coordinator_.tick(now_);
  pass(1999ms);
  EXPECT_THAT(heard(), IsEmpty());
  pass(1ms);
  EXPECT_EQ(heard()[1].at(0).verb, Verb::kNotice);
}

TEST_F(CoordinatorTest, TakesLimitsThatNoClockReaches) {
  join(1, 0, std::chrono::milliseconds::max());
  pass(1h);
  EXPECT_THAT(heard(), IsEmpty());
}

TEST_F(CoordinatorTest, RefusesWhatMakesNoSense) {
  join(1, 0);
  say(1, Verb::kAsk, {"world", "call 7"}, 9);
  const auto question = std::to_string(heard()[1].at(0).id);
  const std::vector<std::pair<Verb, Fields>> senseless{
      {Verb::kSet, {}},
      {Verb::kSet, {"key"}},
      {Verb::kCancel, {}},
      {Verb::kCancel, {"one"}},
      {Verb::kAdd, {"key"}},
      {Verb::kAdd, {"key", "1.5"}},
      {Verb::kCompareSet, {"key", ""}},
      {Verb::kErase, {}},
      {Verb::kAppend, {}},
      {Verb::kAppend, {"key"}},
      {Verb::kMultiSet, {"rank/1"}},
      {Verb::kMultiSet, {"rank/1", "here", "key"}},
      {Verb::kJoin, {"rank/1"}},
      {Verb::kJoin, {"rank/1", "here", "one", "node1", "id", "4001", "5000"}},
      {Verb::kJoin, {"rank/1", "here", "1", "node1", "id", "4001"}},
      {Verb::kReport, {"world", "certain", "PeerError"}},
      {Verb::kReport, {"world", "certain", "PeerError", "message", "one", "late", ""}},
      {Verb::kReport, {"world", "certain", "PeerError", "message", "1", "guilty", ""}},
      {Verb::kAsk, {"world"}},
      {Verb::kBeat, {"in step 1"}},
      {Verb::kAnswer, {}},
      {Verb::kAnswer, {question}},
      {Verb::kWillReport, {}},
      {Verb::kLeave, {"world"}},
      {Verb::kLeaveJob, {"PeerError"}},
      {Verb::kDone, {}},
      {Verb::kWelcome, {"rank 0", "node0", "boot", "1"}},
      {Verb::kNotice, {"", "PeerError", "rank 1 is gone"}},
      {static_cast<Verb>(0), {}},
      {static_cast<Verb>(255), {}}};
  for (const auto& [verb, fields] : senseless)
    EXPECT_THROW(say(1, verb, fields), ProtocolError) << static_cast<int>(verb) << " of " << fields.size() << " fields";
  say(1, Verb::kCheck, {"rank/1"}, 10);
  EXPECT_EQ(answer_to(1), done(10, {"0"}));  // half a claim is none
  lose(1);
  EXPECT_THAT(heard()[2], testing::Each(testing::Field(&StoreMessage::verb, Verb::kNotice)));
}

}  // namespace
}  // namespace lockstep
