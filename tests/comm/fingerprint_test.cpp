#include "comm/watch/fingerprint.h"

#include <set>

#include <gtest/gtest.h>

#include "comm/watch/straggler_report.h"
#include "rendezvous/store/protocol.h"
#include "support/messages.h"
#include "support/recording.h"

namespace lockstep::detail {
namespace {

Fingerprint sum_of(int64_t elements) {
  return {Operation::kAllReduce, c10::ScalarType::Float, elements, ReduceOp::kSum};
}

std::vector<Fingerprint> samples() {
  return {
      sum_of(4),
      sum_of(5),
      {Operation::kAllReduce, c10::ScalarType::Float, 4, ReduceOp::kMax},
      {Operation::kAllReduce, c10::ScalarType::Double, 4, ReduceOp::kSum},
      {Operation::kReduce, c10::ScalarType::Float, 4, ReduceOp::kSum, 0},
      {Operation::kReduce, c10::ScalarType::Float, 4, ReduceOp::kSum, 1},
      {Operation::kBarrier},
      {Operation::kNewGroup, {}, {}, {}, {}, "ranks {0, 1}"},
      {Operation::kNewGroup, {}, {}, {}, {}, "ranks {0, 2}"},
  };
}

TEST(Fingerprint, DiffersExactlyWhereTheCallsDo) {
  auto all = samples();
  for (size_t a = 0; a < all.size(); ++a)
    for (size_t b = 0; b < all.size(); ++b) {
      EXPECT_EQ(difference(all[a], 0, all[b], 1).has_value(), a != b) << describe(all[a]) << ", " << describe(all[b]);
      EXPECT_EQ(hash(all[a], {1}) == hash(all[b], {1}), a == b);
    }
  EXPECT_NE(hash(all[0], {1}), hash(all[0], {2}));
}

TEST(Fingerprint, HashesOfManyCallsDoNotMeetInTheirUpperHalf) {
  std::set<uint64_t> seen;
  for (int number = 0; number < 20000; ++number) seen.insert(hash(sum_of(number % 100), {number}) >> 24);
  EXPECT_EQ(seen.size(), 20000u);
}

TEST(Fingerprint, NoTwoMessagesUnderWayHaveOneHash) {
  Fingerprint send{Operation::kSend, c10::ScalarType::Float, 4};
  std::set<uint64_t> seen;
  std::vector<CallId> subjects{{1},
                               {1, MessageRoute{0, 1, 0}},
                               {2, MessageRoute{0, 1, 0}},
                               {1, MessageRoute{1, 0, 0}},
                               {1, MessageRoute{0, 2, 0}},
                               {1, MessageRoute{0, 1, 1}}};
  for (const auto& call_id : subjects) seen.insert(hash(send, call_id));
  EXPECT_EQ(seen.size(), subjects.size());
}

TEST(Fingerprint, TheTwoEndsOfAMessageAreOneCall) {
  Fingerprint send{Operation::kSend, c10::ScalarType::Float, 4};
  Fingerprint recv{Operation::kRecv, c10::ScalarType::Float, 4};
  EXPECT_EQ(difference(send, 0, recv, 1), std::nullopt);
  EXPECT_EQ(hash(send, {1, MessageRoute{0, 1, 0}}), hash(recv, {1, MessageRoute{0, 1, 0}}));
}

TEST(Fingerprint, PartsBetweenTwoRanksMustBeOfOneSize) {
  Fingerprint zero{Operation::kAllToAll, c10::ScalarType::Float, {}, {}, {}, "", {1, 2}, {1, 3}};
  Fingerprint one{Operation::kAllToAll, c10::ScalarType::Float, {}, {}, {}, "", {3, 4}, {2, 4}};
  EXPECT_EQ(difference(zero, 0, one, 1), std::nullopt);
  one.sends[0] = 5;
  EXPECT_EQ(difference(zero, 0, one, 1), "the number of elements between the two");
  EXPECT_EQ(hash(zero, {1}), hash(one, {1})) << "each pair's own sizes are compared by the backend";
}

TEST(Fingerprint, TravelsWhole) {
  for (const auto& call : samples()) EXPECT_EQ(read_fingerprint(write(call)), call);
  Fingerprint exchange{Operation::kScatter, c10::ScalarType::Int, {}, {}, 2, "", {1, 0, 7}, {}};
  EXPECT_EQ(read_fingerprint(write(exchange)), exchange);
  EXPECT_THROW(read_fingerprint("no"), ProtocolError);
  EXPECT_THROW(read_fingerprint(pack({"a", "b"})), ProtocolError);
  EXPECT_THROW(read_fingerprint(pack({"99", "-1", "-1", "-1", "-1", "", "", ""})), ProtocolError);
}

TEST(Fingerprint, IsDescribedAsItIsWritten) {
  EXPECT_EQ(describe(sum_of(4)), "all_reduce(sum, Float[4])");
  EXPECT_EQ(describe({Operation::kBroadcast, c10::ScalarType::Half, 3, {}, 1}), "broadcast(Half[3], root 1)");
  EXPECT_EQ(describe({Operation::kBarrier}), "barrier()");
  EXPECT_EQ(describe({Operation::kGather, c10::ScalarType::Float, {}, {}, 0, "", {3, 0}, {}}),
            "gather(Float, root 0, sends 3 0)");
}

TEST(CallId, IsDescribedAsPeopleCount) {
  EXPECT_EQ(describe(CallId{7}), "call 7");
  EXPECT_EQ(describe(CallId{3, MessageRoute{0, 2, 5}}), "message 3 from rank 0 to rank 2 with tag 5");
  EXPECT_EQ(describe(CallId{2, {}, Operation::kMonitoredBarrier}), "monitored_barrier 2");
}

// --- what ranks say when they are asked

Membership trio(int me) {
  Membership group{"world", me, 3, me, c10::Device(c10::kCPU), "gloo", "gloo", std::chrono::seconds(1), {}};
  for (int rank = 0; rank < 3; ++rank) group.peers.push_back({rank, {"node", "id", 100 + rank}, ""});
  return group;
}

std::vector<Answer> answers_of(const std::vector<const FlightRecorder*>& recorders, const std::string& call_id) {
  std::vector<std::string> fields;
  for (size_t rank = 0; rank < recorders.size(); ++rank) {
    if (!recorders[rank]) continue;
    fields.push_back(std::to_string(rank));
    fields.push_back(answer(*recorders[rank], "world", call_id));
  }
  return read_answers(fields);
}

TEST(Census, FindsTheRankThatMakesAnotherCall) {
  FlightRecorder same, other;
  begin(same, {0, "world", {7}, sum_of(4), {"a.cpp", 1}});
  begin(other, {0, "world", {7}, sum_of(5), {"b.cpp", 2}});
  CallRecord mine{1, "world", {7}, sum_of(4), {"a.cpp", 1}};
  EXPECT_EQ(find_mismatch(trio(0), mine, answers_of({&same, &same, nullptr}, "call 7")), std::nullopt);
  auto found = find_mismatch(trio(0), mine, answers_of({&same, &same, &other}, "call 7"));
  ASSERT_TRUE(found);
  EXPECT_THAT(*found, testing::AllOf(
                          testing::HasSubstr("as call 7 of group 'world'"),
                          testing::HasSubstr("rank 0 (pid 100 on node) makes all_reduce(sum, Float[4]) at a.cpp:1"),
                          testing::HasSubstr("rank 2 (pid 102 on node) makes all_reduce(sum, Float[5]) at b.cpp:2")));
}

TEST(Census, ARankThatHasFinishedTheCallIsNotLate) {
  FlightRecorder done, away, none;
  change(done, begin(done, {0, "world", {7}, sum_of(4), {"a.cpp", 1}}), CallRecord::State::kDone);
  change(away, begin(away, {0, "world", {6}, {Operation::kBarrier}, {"a.cpp", 9}}), CallRecord::State::kDone);
  auto text = describe_stragglers(trio(0), {7}, answers_of({&done, &away, nullptr}, "call 7"));
  EXPECT_THAT(text, testing::Not(testing::HasSubstr("rank 0")));
  EXPECT_THAT(text, testing::AllOf(testing::HasSubstr("rank 1 (pid 101 on node), which is outside of any call for 0"),
                                   testing::HasSubstr("barrier(), call 6 of group 'world' at a.cpp:9"),
                                   testing::HasSubstr("rank 2 (pid 102 on node), which does not answer")));
  EXPECT_THAT(describe_stragglers(trio(0), {7}, answers_of({&done, &done, &done}, "call 7")),
              testing::HasSubstr("All ranks"));
}

TEST(Census, RanksOfTheJobOutsideTheGroupDoNotCount) {
  FlightRecorder other;
  begin(other, {0, "world", {7}, sum_of(5), {"b.cpp", 2}});
  Membership pair = trio(0);
  pair.size = 2;
  pair.peers = {pair.peers[0], pair.peers[2]};
  CallRecord mine{1, "world", {7}, sum_of(4), {"a.cpp", 1}};
  EXPECT_EQ(find_mismatch(pair, mine, answers_of({nullptr, &other}, "call 7")), std::nullopt);
  EXPECT_THAT(describe_stragglers(pair, {7}, {}), testing::HasSubstr("rank 1 (rank 2 of the job, pid 102 on node)"));
}

}  // namespace
}  // namespace lockstep::detail
