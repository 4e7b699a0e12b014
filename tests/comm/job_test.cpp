#include "comm/watch/job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/group/group.h"
#include "support/eventually.h"
#include "support/messages.h"
#include "support/recording.h"
#include "support/store_host.h"

namespace lockstep::detail {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;

/// A rank of two, at the store of a host.
struct Rank {
  Rank(const StoreHost& host, int rank, int joins_before) : client(host.connect()) {
    join(*client, 10 * joins_before + rank);  // a key of its own
    job =
        std::make_unique<Job>(std::vector<Peer>(2), rank, joins_before, make_remote_store(client), "", client, nullptr);
  }
  std::shared_ptr<StoreClient> client;
  std::unique_ptr<Job> job;
};

class Hearing : public JobListener {
 public:
  void on_failure(std::exception_ptr) override { ++failures; }
  void on_left(int, int64_t) override { ++departures; }
  std::atomic<int> failures = 0, departures = 0;
};

class Reading final : public Hearing {
 public:
  bool on_note(int rank, const std::string& content) override {
    notes.push_back(text(rank, ": ", content));
    return true;
  }
  std::vector<std::string> notes;
};

TEST(Job, ToldOfAnotherJoinKnowsThatItIsNotMeant) {
  StoreHost host;
  Rank old_rank(host, 1, 0), other(host, 1, 1), mine(host, 0, 1);
  Hearing hearing;
  mine.job->subscribe("world", hearing);
  old_rank.job->leave("world", 3, 2);
  old_rank.job->report("world", {ErrorKind::kTimeout, "too late"}, Job::Certainty::kCertain);
  old_rank.client->call(Verb::kCheck, {});
  mine.client->call(Verb::kCheck, {});  // what was told before has been heard
  EXPECT_EQ(hearing.failures, 0);
  EXPECT_EQ(hearing.departures, 0);
  // The first cause of one is not that of the other.
  EXPECT_EQ(other.job->report("world", {ErrorKind::kPeer, "gone"}, Job::Certainty::kCertain).message, "gone");
  other.job->leave("world", 3, 2);
  other.client->call(Verb::kCheck, {});
  mine.client->call(Verb::kCheck, {});
  EXPECT_EQ(hearing.failures, 1);
  EXPECT_EQ(hearing.departures, 1);
  mine.job->unsubscribe(hearing);
}

// A group for the tensors of one device, and its cpu_group for those of another.
TEST(Job, AFailureOfAGroupIsOneOfItsPartnerToo) {
  StoreHost host;
  Rank other(host, 1, 0), mine(host, 0, 0);
  Hearing group, cpu_group, stranger, late;
  mine.job->subscribe("world", group);
  mine.job->subscribe("world:cpu", cpu_group);
  mine.job->subscribe("world/1", stranger);
  other.job->report("world:cpu", {ErrorKind::kTimeout, "too late"}, Job::Certainty::kCertain);
  mine.client->call(Verb::kCheck, {});  // what was told before has been heard
  EXPECT_EQ(group.failures, 1);
  EXPECT_EQ(cpu_group.failures, 1);
  EXPECT_EQ(stranger.failures, 0);
  mine.job->subscribe("world", late);
  EXPECT_EQ(late.failures, 1) << "it is told what happened before";
  for (auto* listener : {&group, &cpu_group, &stranger, &late}) mine.job->unsubscribe(*listener);
}

TEST(Job, WhatBreaksAGroupHereBreaksItsPartnerBeforeAnybodyIsAsked) {
  StoreHost host;
  Rank mine(host, 0, 0);
  const std::shared_ptr<Job> job = std::move(mine.job);
  const auto make = [&](const std::string& name, std::shared_ptr<Group> cpu_group) {
    Membership membership;
    membership.name = name;
    return std::make_shared<Group>(membership, job, nullptr, std::move(cpu_group));
  };
  const auto cpu_group = make("world:cpu", nullptr), group = make("world", cpu_group);
  group->abort(std::make_exception_ptr(PeerError("enough")));
  expect_error<PeerError>([&] { cpu_group->check_working(); }, "enough");
}

TEST(Job, AsksOnlyAboutItsOwnJoin) {
  StoreHost host;
  Rank old_rank(host, 1, 0), mine(host, 0, 1);
  CallRecord record;
  record.group = "world";
  record.call_id = {1};
  begin(*old_rank.job->recorder(), record);
  const auto answers = mine.job->ask("world", "call 1");
  ASSERT_EQ(answers.size(), 2u);
  for (const auto& answer : answers) EXPECT_FALSE(answer.call) << answer.rank_in_job;
}

// While a group is being made, others listen for it, and a rank that has made it sends it notes already.
TEST(Job, KeepsANoteUntilAListenerTakesIt) {
  StoreHost host;
  Rank other(host, 1, 0), mine(host, 0, 0);
  Hearing hearing;
  mine.job->subscribe("world", hearing);
  other.job->note(0, "world", "first");
  other.job->note(0, "world/1", "of another group");
  other.client->call(Verb::kCheck, {});
  mine.client->call(Verb::kCheck, {});  // what was told before has been heard
  Reading reading, late;
  mine.job->subscribe("world", reading);
  EXPECT_THAT(reading.notes, testing::ElementsAre("1: first"));
  mine.job->subscribe("world", late);
  EXPECT_THAT(late.notes, testing::IsEmpty()) << "it was taken";
  for (Hearing* listener : {&hearing, static_cast<Hearing*>(&reading), static_cast<Hearing*>(&late)})
    mine.job->unsubscribe(*listener);
}

// The others are woken by it and give up too; the first must be known by then.
TEST(Job, IsOverAtOnceWhenAnExceptionEndsTheWorld) {
  StoreHost host;
  Ear ear;
  auto watcher = host.connect();
  watcher->listen(&ear);
  Rank failing(host, 1, 0);
  failing.job->give_up_group("world", "rank 1");
  EXPECT_THAT(ear.failure_within(5s), AllOf(testing::StartsWith(": PeerError: rank 1"), HasSubstr("gave up")));
  ASSERT_TRUE(eventually([&] { return host.server.first_cause().has_value(); }));
  EXPECT_EQ(host.server.first_cause()->culprit, (Culprit{1, CulpritRole::kGaveUp}));
}

TEST(Job, GoesOnWhenAnExceptionEndsASmallerGroup) {
  StoreHost host;
  Ear ear;
  auto watcher = host.connect();
  watcher->listen(&ear);
  Rank failing(host, 1, 0);
  failing.job->give_up_group("world/1", "rank 1");
  EXPECT_THAT(ear.failure_within(5s), AllOf(testing::StartsWith("0/world/1: PeerError: rank 1 gave up")));
  EXPECT_FALSE(host.server.first_cause());
}

}  // namespace
}  // namespace lockstep::detail
