// A rank's connection to the store: what it hears, and what it is refused.

#include "rendezvous/store/store_client.h"

#include <future>

#include <lockstep/error.h>
#include <lockstep/tcp_store.h>

#include "support/child_process.h"
#include "support/eventually.h"
#include "support/loopback.h"
#include "support/messages.h"
#include "support/stolen_time.h"
#include "support/store_host.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;
using Clock = std::chrono::steady_clock;

TEST(HeartbeatSchedule, ReportsANewActivityAtOnceAndThenLessAndLessOften) {
  HeartbeatSchedule schedule(250ms, Clock::time_point());
  std::vector<int64_t> regular, hurried;
  const auto run_until = [&](Clock::time_point end, std::vector<int64_t>& times) {
    const auto begin = end - 1s;
    for (auto now = begin; now < end; now += 1ms)
      if (schedule.is_due(now)) times.push_back((now - begin) / 1ms);
  };
  run_until(Clock::time_point(1s), regular);
  EXPECT_THAT(regular, testing::ElementsAre(0, 250, 500, 750));
  schedule.make_due(Clock::time_point(1s));
  run_until(Clock::time_point(2s), hurried);
  EXPECT_THAT(hurried, testing::ElementsAre(0, 10, 30, 70, 150, 310, 560, 810));
}

TEST(StoreClient, TellsWhenTheHostOfTheStoreIsKilled) {
  ChildProcess child(host_store);
  Ear ear;
  StoreClient client(client_options(std::stoi(child.read_line())));
  client.listen(&ear);
  auto waiting = std::async(std::launch::async, [&] { client.call(Verb::kGet, {"never"}); });
  const Stopwatch watch;
  child.kill(SIGKILL);
  EXPECT_THAT(ear.failure_within(5s), AllOf(HasSubstr(": PeerError: rank 0 (pid " + std::to_string(child.pid())),
                                            HasSubstr("hosts the job's store, is gone")));
  EXPECT_LT(watch.unstolen(), 1s);
  expect_error<PeerError>([&] { waiting.get(); }, "rank 0", "hosts the job's store");
  expect_error<PeerError>([&] { client.call(Verb::kCheck, {}); }, "rank 0", "hosts the job's store");
}

TEST(StoreClient, TellsWhenTheHostOfTheStoreIsStopped) {
  ChildProcess child(host_store);
  Ear ear;
  auto client = std::make_unique<StoreClient>(client_options(std::stoi(child.read_line()), 500ms));
  client->listen(&ear);
  Stopwatch watch;
  child.kill(SIGSTOP);
  EXPECT_THAT(
      ear.failure_within(10s),
      AllOf(HasSubstr("rank 0"), HasSubstr("hosts the job's store, sent no heartbeat for"), HasSubstr("stopped")));
  EXPECT_LT(watch.unstolen(), 2s);
  EXPECT_EQ(client->over()->culprit, (Culprit{0, CulpritRole::kSilent}));
  watch = Stopwatch();
  client.reset();
  EXPECT_LT(watch.unstolen(), 1s);
}

TEST(StoreClient, KnowsAnEndInOrderFromAFailure) {
  Ear ear;
  auto host = std::make_unique<StoreHost>();
  auto client = host->connect();
  client->listen(&ear);
  join(*client, 0);
  auto other = host->connect();
  join(*other, 1);
  auto waiting = std::async(std::launch::async, [&] { make_remote_store(client)->get("never", 20s); });
  const Stopwatch watch;
  host.reset();
  EXPECT_LT(watch.unstolen(), 1s);
  expect_error<PeerError>([&] { waiting.get(); }, "rank 0", "has ended");
  expect_error<PeerError>([&] { make_remote_store(client)->set("key", "value"); }, "rank 0", "has ended");
  expect_error<PeerError>([&] { make_remote_store(other)->add("key", 1); }, "rank 0", "has ended");
  EXPECT_EQ(ear.failures(), 0u);
}

TEST(StoreClient, GoesWithoutTroubleForTheOthers) {
  Ear ear;
  StoreHost host;
  auto client = host.connect();
  client->listen(&ear);
  auto leaving = host.connect();
  join(*leaving, 1);
  leaving->send_async(Verb::kLeave, {"world", "12", "2", "group/world|"});
  EXPECT_EQ(ear.left_within(5s), "1 left world after 12");
  const Stopwatch watch;
  leaving.reset();
  EXPECT_LT(watch.unstolen(), 400ms);
  ASSERT_TRUE(ear.hears_ticks());
  EXPECT_EQ(ear.failures(), 0u);
}

TEST(StoreClient, TellsTheOthersWhyItGaveUp) {
  Ear ear;
  StoreHost host;
  auto client = host.connect();
  client->listen(&ear);
  auto leaving = host.connect();
  join(*leaving, 1);
  leaving->leave_job(Failure{ErrorKind::kTimeout, "its data is missing"});
  EXPECT_THAT(ear.failure_within(5s),
              AllOf(HasSubstr(": TimeoutError: rank 1"), HasSubstr("gave up: its data is missing")));
}

TEST(StoreClient, AsksAndAnswers) {
  Ear ear;
  StoreHost host;
  auto one = host.connect(), two = host.connect();
  one->listen(&ear);
  join(*one, 0);
  join(*two, 1);  // it has no listener, and nothing to say
  auto answers = one->call(Verb::kAsk, {"world", "call 7"});
  ASSERT_EQ(answers.size(), 4u);
  EXPECT_EQ(answers[answers[0] == "0" ? 1 : 3], "about call 7 of world");
  std::promise<std::optional<StoreClient::Fields>> later;
  one->call(Verb::kCheck, {}, [&](std::optional<StoreClient::Fields> fields) { later.set_value(fields); });
  EXPECT_EQ(later.get_future().get(), StoreClient::Fields{"1"});
}

// Between joining and listening a rank may wait for the others, and one of them may die.
TEST(StoreClient, TellsAListenerWhatHappenedBeforeItListened) {
  Ear ear, late_ear;
  StoreHost host;
  auto client = host.connect();
  join(*client, 0);
  Relay relay(host.server.port());
  StoreClient victim(client_options(relay.port()));
  join(victim, 1);
  relay.cut();
  expect_error<PeerError>([&] { make_remote_store(client)->get("never", 20s); }, "rank 1");
  client->listen(&ear);
  EXPECT_THAT(ear.failure_within(10s), HasSubstr("rank 1"));
  ASSERT_TRUE(eventually([&] {
    try {
      victim.call(Verb::kCheck, {});
      return false;
    } catch (const PeerError&) {
      return true;
    }
  }));
  victim.listen(&late_ear);
  EXPECT_THAT(late_ear.failure_within(10s), HasSubstr("hosts the job's store, is gone"));
}

/// Expects a client to be refused quickly with these words.
template <class... Parts>
void expect_refusal(StoreClient::Options options, const Parts&... parts) {
  const Stopwatch watch;
  expect_error<PeerError>([&] { StoreClient{options}; }, to_string(options.endpoint), parts...);
  EXPECT_LT(watch.unstolen(), 2s);
}

TEST(StoreClient, IsRefusedWithAnotherSecretOrGeneration) {
  StoreHost host;
  auto options = client_options(host.server.port());
  options.key = Secret::random().key(0);
  expect_refusal(options, "do not have the same secret", "LOCKSTEP_SECRET_FILE");
  options.key = test_secret().key(1);
  expect_refusal(options, "do not have the same secret");
  options.generation = 1;
  expect_refusal(options, "do not have the same secret");
}

TEST(StoreClient, RefusesWhateverElseListensThere) {
  SideServer echo([](const FileDescriptor& socket) {
    std::array<char, 4096> bytes;
    while (is_readable(socket, 1s)) {
      const ssize_t got = ::recv(socket.get(), bytes.data(), bytes.size(), 0);
      if (got <= 0 || ::send(socket.get(), bytes.data(), static_cast<size_t>(got), MSG_NOSIGNAL) < 0) return;
    }
  });
  expect_refusal(client_options(echo.port()), "no lockstep store", "no other job uses this port");
  SideServer web([](const FileDescriptor& socket) {
    std::array<char, 4096> bytes;
    if (is_readable(socket, 1s)) ::recv(socket.get(), bytes.data(), bytes.size(), 0);
    const std::string_view answer = "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n";
    ::send(socket.get(), answer.data(), answer.size(), MSG_NOSIGNAL);
  });
  expect_refusal(client_options(web.port()), "no lockstep store", "no other job uses this port");
}

// A store that is full drops connections too, so this may pass; but the port of another must not be hammered.
TEST(StoreClient, TriesAgainAtALeisurelyPaceWhereItIsDropped) {
  SideServer hermit([](const FileDescriptor&) {});
  const auto options = client_options(hermit.port(), 5s, 500ms);
  expect_error<TimeoutError>([&] { StoreClient{options}; }, to_string(options.endpoint), "did not accept this process");
  EXPECT_GE(hermit.accepted(), 2);
  EXPECT_LE(hermit.accepted(), 100);
}

TEST(StoreClient, DoesNotWaitForeverForOneThatSaysNothing) {
  SideServer silent([](const FileDescriptor& socket) {
    std::array<char, 4096> bytes;
    while (is_readable(socket, 1s) && ::recv(socket.get(), bytes.data(), bytes.size(), 0) > 0) continue;
  });
  const Stopwatch watch;
  expect_error<TimeoutError>([&] { StoreClient(client_options(silent.port(), 5s, 300ms)); }, "it did not answer");
  EXPECT_LT(watch.unstolen(), 2s);
}

// A process that was forked has all sockets too, so that closing one does not end it.
TEST(StoreClient, IsLeftToItsParentByAForkedChild) {
  StoreHost host;
  Ear ear;
  auto client = host.connect();
  auto other = host.connect();
  ASSERT_EQ(join(*client, 0), "here");
  other->listen(&ear);
  pid_t child = ::fork();
  if (child == 0) {
    client.reset();
    ::_exit(0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  for (int i = 0; i < 10; ++i) client->call(Verb::kSet, {"key", "value"});
  EXPECT_EQ(ear.failures(), 0u);
  other->stop_listening();
}

}  // namespace
}  // namespace lockstep
