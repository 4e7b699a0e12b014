#include "rendezvous/store/store_server.h"

#include <sys/resource.h>

#include <ctime>
#include <future>
#include <list>

#include <lockstep/error.h>
#include <lockstep/tcp_store.h>

#include "support/child_process.h"
#include "support/eventually.h"
#include "support/log_lines.h"
#include "support/loopback.h"
#include "support/messages.h"
#include "support/stolen_time.h"
#include "support/store_host.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using Clock = std::chrono::steady_clock;

TEST(StoreServer, ServesManyThreadsOfManyClients) {
  StoreHost host;
  std::vector<std::shared_ptr<Store>> stores;
  for (int client = 0; client < 4; ++client) stores.push_back(host.open());
  std::vector<std::future<void>> threads;
  for (int thread = 0; thread < 8; ++thread)
    threads.push_back(std::async(std::launch::async, [&, thread] {
      auto& store = *stores[static_cast<size_t>(thread) % stores.size()];
      for (int round = 0; round < 50; ++round) {
        const auto key = std::to_string(thread) + "/" + std::to_string(round);
        store.add("sum", 1);
        store.set(key, std::string(static_cast<size_t>(round) * 100, 'x'));
        ASSERT_EQ(store.get(key, 10s).size(), static_cast<size_t>(round) * 100);
        // Its neighbour may be ahead or behind.
        store.wait({std::to_string((thread + 1) % 8) + "/" + std::to_string(round)}, 20s);
        ASSERT_TRUE(store.check({key}));
        ASSERT_EQ(store.compare_set("turn", "", "taken"), "taken");
      }
    }));
  for (auto& thread : threads) thread.get();
  EXPECT_EQ(stores[0]->add("sum", 0), 400);
  EXPECT_TRUE(stores[1]->erase("0/0"));
  EXPECT_FALSE(stores[2]->erase("0/0"));
}

TEST(StoreServer, CarriesValuesOfMegabytes) {
  StoreHost host;
  auto one = host.open(), two = host.open();
  const std::string large(20 << 20, 'x');
  one->set("large", large);
  EXPECT_TRUE(two->get("large", 20s) == large);
  one->set("large 2", large);
  one->set("large 3", large);
  one->set("large 4", large);
  // One after the other; not in one answer, which would be too long.
  expect_error<UsageError>([&] { two->wait({"large", "large 2", "large 3", "large 4"}, 20s); }, "64 MiB");
  EXPECT_TRUE(two->get("large 4", 20s) == large);
  expect_error<UsageError>([&] { one->set("too large", std::string(64 << 20, 'x')); }, "64 MiB");
  EXPECT_FALSE(two->check({"too large"}));
}

TEST(StoreServer, EndsAWaitWithTheKeysThatDidNotCome) {
  StoreHost host;
  auto store = host.open();
  store->set("there", "1");
  const Stopwatch watch;
  expect_error<TimeoutError>([&] { store->wait({"there", "one", "two"}, 50ms); }, "one and two", "50 ms");
  EXPECT_GE(watch.elapsed(), 50ms);
  EXPECT_LT(watch.unstolen(), 5s);
  expect_error<TimeoutError>([&] { store->get("one", 0ms); }, "one");
  EXPECT_EQ(store->get("there", 0ms), "1");
}

TEST(StoreServer, TellsTheOthersWhenALifeLineBreaks) {
  Ear ear;
  StoreHost host;
  auto watcher = host.connect();
  watcher->listen(&ear);
  join(*watcher, 0);
  Relay relay(host.server.port());
  Ear own_ear("in all_reduce 12");
  StoreClient victim(client_options(relay.port()));
  victim.listen(&own_ear);
  join(victim, 1);
  const auto pid = std::to_string(this_process().pid);
  const Stopwatch watch;
  relay.cut();
  const auto failure = ear.failure_within(5s);
  EXPECT_LT(watch.unstolen(), 1s);
  EXPECT_THAT(failure, AllOf(HasSubstr(": PeerError: rank 1 (pid " + pid), HasSubstr("is gone: its connection")));
  EXPECT_THAT(own_ear.failure_within(5s),
              AllOf(HasSubstr("PeerError: rank 0 (pid " + pid), HasSubstr("which hosts the job's store, is gone")));
  expect_error<PeerError>([&] { make_remote_store(watcher)->get("never", 20s); }, "rank 1");
}

TEST(StoreServer, TellsWhoWasKilledAndWhatItWasDoing) {
  ChildProcess child([](const ChildProcess::Parent& test) {
    Ear ear("in all_reduce 12");
    StoreClient client(client_options(std::stoi(test.read_line()), 500ms));
    client.listen(&ear);
    join(client, 3);
    ear.has_told();
    client.call(Verb::kCheck, {});  // answered when the heartbeat has come
    test.write_line("ready");
    test.read_line();
  });
  Ear ear;
  StoreHost host;
  auto watcher = host.connect();
  watcher->listen(&ear);
  child.write_line(std::to_string(host.server.port()));
  ASSERT_EQ(child.read_line(), "ready");
  const Stopwatch watch;
  child.kill(SIGKILL);
  EXPECT_THAT(ear.failure_within(5s), AllOf(HasSubstr("rank 3 (pid " + std::to_string(child.pid()) + " on "),
                                            HasSubstr("is gone"), HasSubstr("in all_reduce 12")));
  EXPECT_LT(watch.unstolen(), 1s);
}

TEST(StoreServer, TellsWhoIsStoppedOnceItsLimitIsOver) {
  ChildProcess child([](const ChildProcess::Parent& test) {
    StoreClient client(client_options(std::stoi(test.read_line()), 500ms));
    join(client, 3, 500ms);
    test.write_line("ready");
    test.read_line();
  });
  Ear ear;
  StoreHost host;
  auto watcher = host.connect();
  watcher->listen(&ear);
  child.write_line(std::to_string(host.server.port()));
  ASSERT_EQ(child.read_line(), "ready");
  const Stopwatch watch;
  child.kill(SIGSTOP);
  EXPECT_THAT(ear.failure_within(10s), AllOf(HasSubstr("rank 3 (pid " + std::to_string(child.pid()) + " on "),
                                             HasSubstr("sent no heartbeat for"), HasSubstr("It had joined ")));
  EXPECT_LT(watch.unstolen(), 2s);
}

Failure cause_of(const std::string& message, int rank) {
  return {ErrorKind::kPeer, message, Culprit{rank, CulpritRole::kExited}};
}

/// One that takes its time to take in what it is told.
class SlowEar : public Ear {
 public:
  void on_failure(const std::string& group, const Failure& failure) override {
    std::this_thread::sleep_for(100ms);
    Ear::on_failure(group, failure);
  }
};

TEST(StoreServer, EndsAJobWhenEveryRankKnowsWhy) {
  StoreHost host;
  Ear quick;
  SlowEar slow;
  auto one = host.connect(), two = host.connect(), waiting_line = host.connect();
  one->listen(&quick);
  two->listen(&slow);
  join(*one, 0);
  join(*two, 1);
  auto waiting = std::async(std::launch::async, [&] { make_remote_store(waiting_line)->get("never", 20s); });
  EXPECT_FALSE(host.server.first_cause());
  const auto told = host.server.end_job(cause_of("rank 2 has failed: exit code 3", 2));
  EXPECT_EQ(quick.failures(), 1u) << "before it returns";
  EXPECT_EQ(slow.failures(), 1u);
  EXPECT_EQ(quick.failure_within(0ms), ": PeerError: rank 2 has failed: exit code 3");
  EXPECT_EQ(told.message, "rank 2 has failed: exit code 3");
  EXPECT_EQ(told.culprit, (Culprit{2, CulpritRole::kExited}));
  EXPECT_EQ(host.server.first_cause()->culprit->rank, 2);
  expect_error<PeerError>([&] { waiting.get(); }, "rank 2 has failed");
  auto late = host.connect();
  expect_error<PeerError>([&] { join(*late, 2); }, "rank 2 has failed");
}

TEST(StoreServer, KeepsTheFirstCauseWhoeverEndsTheJobLater) {
  StoreHost host;
  Ear ear;
  auto client = host.connect();
  client->listen(&ear);
  join(*client, 0);
  Relay relay(host.server.port());
  StoreClient victim(client_options(relay.port()));
  join(victim, 1);
  relay.cut();
  EXPECT_THAT(ear.failure_within(5s), HasSubstr("rank 1"));
  for (int later : {2, 3}) {
    const auto told = host.server.end_job(cause_of("rank 2 has failed", later));
    EXPECT_THAT(told.message, AllOf(HasSubstr("rank 1"), HasSubstr("is gone")));
    EXPECT_EQ(told.culprit, (Culprit{1, CulpritRole::kGone}));
  }
  EXPECT_EQ(ear.failures(), 1u);
}

TEST(StoreServer, EndsAJobAtOnceWhenNobodyHasJoined) {
  StoreHost host;
  auto stranger_to_the_job = host.connect();
  const Stopwatch watch;
  EXPECT_EQ(host.server.end_job(cause_of("rank 0 has failed", 0)).culprit->rank, 0);
  EXPECT_LT(watch.unstolen(), 900ms) << "nobody's answer is waited for";
}

TEST(StoreServer, DoesNotWaitLongForARankThatIsFrozenToKnowThatTheJobIsOver) {
  ChildProcess child([](const ChildProcess::Parent& test) {
    StoreClient client(client_options(std::stoi(test.read_line()), 60s));
    join(client, 1, 60s);
    test.write_line("ready");
    test.read_line();
  });
  Ear ear;
  StoreHost host;
  auto client = host.connect();
  client->listen(&ear);
  join(*client, 0);
  child.write_line(std::to_string(host.server.port()));
  ASSERT_EQ(child.read_line(), "ready");
  child.kill(SIGSTOP);
  int status = 0;
  ASSERT_EQ(::waitpid(child.pid(), &status, WUNTRACED), child.pid());
  ASSERT_TRUE(WIFSTOPPED(status));
  const Stopwatch watch;
  host.server.end_job(cause_of("rank 2 has failed", 2));
  EXPECT_GT(watch.elapsed(), 900ms) << "it had its time";
  EXPECT_LT(watch.unstolen(), 2s);
  EXPECT_EQ(ear.failures(), 1u);
}

TEST(StoreServer, EndsAtOnceWhenTheOthersLetGo) {
  auto host = std::make_unique<StoreHost>();
  auto client = host->connect();
  join(*client, 0);
  const Stopwatch watch;
  host.reset();
  EXPECT_LT(watch.unstolen(), 400ms);
}

TEST(StoreServer, NamesTheProcessThatHasItsPort) {
  StoreHost host;
  expect_error<SystemError>([&] { StoreServer(host_options("127.0.0.1", host.server.port())); },
                            ":" + std::to_string(host.server.port()), "in use by pid " + std::to_string(::getpid()));
}

TEST(StoreServer, GetsAPortFromTheSystem) {
  StoreHost one, two;
  EXPECT_GT(one.server.port(), 0);
  EXPECT_NE(one.server.port(), two.server.port());
}

TEST(StoreServer, WorksOverIpv6) {
  try {
    listen_at({"::1", 0});
  } catch (const SystemError&) {
    GTEST_SKIP() << "this machine has no ::1";
  }
  StoreServer server(host_options("::1"));
  auto options = client_options(server.port());
  options.endpoint.host = "::1";
  auto client = std::make_shared<StoreClient>(options);
  EXPECT_EQ(client->local_address(), "::1");
  make_remote_store(client)->set("key", "value");
  EXPECT_EQ(make_remote_store(client)->get("key", 10s), "value");
}

TEST(StoreServer, IsNotKeptBusyByAForkOfItsProcess) {
  StoreHost host;
  Ear ear;
  auto leaving = host.open();
  auto staying = host.connect();
  staying->listen(&ear);
  Stranger stranger(host.server.port());
  stranger.say("GET");
  for (int look : {1, 2}) staying->call(Verb::kCheck, {std::to_string(look)});  // it has accepted the stranger
  const pid_t child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) ::pause();
  }
  stranger.say(" / HTTP/1.1\r\n\r\n");
  EXPECT_TRUE(stranger.is_cut_off_within(1s));
  leaving.reset();
  const Stopwatch watch;
  const auto before = std::clock();
  ASSERT_TRUE(ear.hears_ticks());  // a tenth of a second each
  const double busy = static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC;
  EXPECT_LT(busy, std::chrono::duration<double>(watch.elapsed()).count() / 3);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

// No descriptors are left for a while: whoever is connected is served, and there is room again when one goes.
TEST(StoreServer, SurvivesWithoutFileDescriptors) {
  ChildProcess child([](const ChildProcess::Parent& test) {
    const rlimit few{32, 32};
    ::setrlimit(RLIMIT_NOFILE, &few);
    host_store(test);
  });
  const int port = std::stoi(child.read_line());
  std::list<std::shared_ptr<Store>> stores;
  // Strangers make room.
  std::vector<Stranger> strangers;
  for (int i = 0; i < 40; ++i) strangers.emplace_back(port);
  stores.push_back(make_remote_store(std::make_shared<StoreClient>(client_options(port))));
  EXPECT_THAT(child.read_line(), HasSubstr("rejected a connection"));
  strangers.clear();
  // Those who know the secret do not.
  for (bool has_room = true; has_room && stores.size() < 40;) try {
      stores.push_back(make_remote_store(std::make_shared<StoreClient>(client_options(port, 5s, 300ms))));
    } catch (const TimeoutError&) {
      has_room = false;
    }
  EXPECT_GT(stores.size(), 5u);
  EXPECT_LT(stores.size(), 32u);
  std::string line;
  do line = child.read_line();
  while (line.find("rejected a connection") != line.npos);
  EXPECT_THAT(line, AllOf(HasSubstr("cannot accept"), HasSubstr("Too many open files"), HasSubstr("ulimit -n")));
  for (auto& store : stores) EXPECT_GT(store->add("n", 1), 0);
  stores.pop_front();
  stores.push_back(make_remote_store(std::make_shared<StoreClient>(client_options(port))));
  EXPECT_GT(stores.back()->add("n", 1), 0);
  child.end_input();
  EXPECT_EQ(child.wait(), 0);
  for (auto& store : stores) EXPECT_THROW(store->add("n", 1), PeerError);
}

}  // namespace
}  // namespace lockstep
