// What calls on several keys cost on the wire, how they end when the job fails, and what they return in Python.

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <future>
#include <iterator>
#include <mutex>
#include <sstream>

#include <lockstep/error.h>

#include "rendezvous/store/coordinator.h"
#include "support/loopback.h"
#include "support/messages.h"
#include "support/rank_process.h"
#include "support/slow_relay.h"
#include "support/store_host.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;

/// A store for one client that records the requests which it receives. Heartbeats and kLeaveJob are no requests.
class RecordingStore {
 public:
  int port() const { return server_.port(); }

  /// Returns the requests since the last call.
  std::vector<Verb> take_requests() {
    std::lock_guard lock(mutex_);
    return std::exchange(requests_, {});
  }

 private:
  // Answers until the client closes the connection.
  void serve(const FileDescriptor& socket) {
    const TlsContext tls(TlsContext::Side::kServer, key_identity(0), test_secret().key(0));
    TlsSession session(tls);
    Coordinator coordinator({"rank 0", this_process(), 0});
    Decoder decoder;
    bool is_connected = false;
    std::array<char, 64 << 10> bytes;
    for (;;) {
      const ssize_t got = ::recv(socket.get(), bytes.data(), bytes.size(), 0);
      if (got <= 0) return;
      decoder.feed(session.receive({bytes.data(), static_cast<size_t>(got)}));
      if (session.is_authenticated() && !std::exchange(is_connected, true)) coordinator.connected(1);
      while (const auto message = decoder.next()) {
        record(message->verb);
        coordinator.received(1, *message, std::chrono::steady_clock::now());
      }
      for (const auto& [to, message] : coordinator.take_outgoing()) session.send(encode(message));
      const auto output = session.take_output();
      if (::send(socket.get(), output.data(), output.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(output.size()))
        return;
    }
  }

  void record(Verb verb) {
    if (verb == Verb::kBeat || verb == Verb::kLeaveJob) return;
    std::lock_guard lock(mutex_);
    requests_.push_back(verb);
  }

  std::mutex mutex_;
  std::vector<Verb> requests_;  // guarded by mutex_
  SideServer server_{[this](const FileDescriptor& socket) { serve(socket); }};
};

class StoreRequests : public testing::Test {
 protected:
  std::vector<std::pair<std::string, std::string>> values(const std::string& prefix, int count) {
    std::vector<std::pair<std::string, std::string>> result;
    for (int key = 0; key < count; ++key) result.emplace_back(prefix + std::to_string(key), std::to_string(key));
    return result;
  }

  RecordingStore recording_;
  std::shared_ptr<Store> store_ = make_remote_store(std::make_shared<StoreClient>(client_options(recording_.port())));
};

TEST_F(StoreRequests, AreOneForAnyNumberOfKeys) {
  constexpr int kRanks = 1000;
  store_->multi_set(values("rank/", kRanks));
  EXPECT_THAT(recording_.take_requests(), ElementsAre(Verb::kMultiSet));
  std::vector<std::string> keys;
  for (const auto& [key, value] : values("rank/", kRanks)) keys.push_back(key);
  EXPECT_EQ(store_->multi_get(keys, 20s).at(kRanks - 1), "999");
  EXPECT_THAT(recording_.take_requests(), ElementsAre(Verb::kGet));
  store_->append("rank/0", "more");
  EXPECT_THAT(recording_.take_requests(), ElementsAre(Verb::kAppend));
  EXPECT_EQ(store_->all_gather("rank", 999, kRanks, "last", 20s).at(0), "0more");
  EXPECT_THAT(recording_.take_requests(), ElementsAre(Verb::kSet, Verb::kGet));
}

TEST_F(StoreRequests, AreCancelledAfterTheTimeOut) {
  store_->set("a", "1");
  expect_error<TimeoutError>([&] { store_->multi_get({"a", "b"}, 1ms); }, "no value for b");
  EXPECT_THAT(recording_.take_requests(), ElementsAre(Verb::kSet, Verb::kGet, Verb::kCancel));
}

TEST(StoreRequest, OfSeveralKeysEndsWithTheFailureOfTheJob) {
  StoreHost host;
  auto one = host.connect(), two = host.connect();
  join(*one, 0);
  join(*two, 1);
  make_remote_store(two)->set("here", "1");
  auto waiting = std::async(std::launch::async, [&] { make_remote_store(one)->multi_get({"here", "never"}, 60s); });
  two->leave_job(Failure{ErrorKind::kPeer, "its data is missing"});
  expect_error<PeerError>([&] { waiting.get(); }, "rank 1", "gave up: its data is missing");
}

TEST(StoreRequest, ThatIsRefusedLeavesTheConnectionUsable) {
  StoreHost host;
  auto store = host.open();
  store->set("log", std::string(60 << 20, 'x'));
  expect_error<UsageError>([&] { store->append("log", std::string(5 << 20, 'y')); }, "append", "'log'", "64 MiB");
  expect_error<UsageError>([&] { store->multi_get({"log", "log"}, 20s); }, "2 requested keys", "64 MiB");
  expect_error<UsageError>([&] { store->multi_set({{"a", "1"}, {"b", std::string(64 << 20, 'y')}}); }, "64 MiB");
  expect_error<UsageError>([&] { store->multi_set({size_t{1} << 20, {"k", ""}}); }, "several requests");
  EXPECT_FALSE(store->check({"a"}));
  EXPECT_FALSE(store->check({"k"}));
  EXPECT_EQ(store->get("log", 20s).size(), size_t{60} << 20);
}

/// The heartbeats of a client wait behind its request, those of the store behind its answer.
TEST(StoreRequest, MayTakeLongerThanTheHeartbeatLimit) {
  constexpr auto kLimit = 2s;
  constexpr size_t kBytes = 9 << 20;
  StoreHost host;
  SlowRelay relay(host.server.port(), 0ms, 4 << 20);
  auto client = std::make_shared<StoreClient>(client_options(relay.port(), kLimit));
  join(*client, 1, kLimit);
  auto store = make_remote_store(client);
  const auto begin = std::chrono::steady_clock::now();
  store->set("large", std::string(kBytes, 'x'));
  EXPECT_GT(std::chrono::steady_clock::now() - begin, kLimit) << "the test is void";
  EXPECT_EQ(store->get("large", 60s).size(), kBytes);
  EXPECT_TRUE(host.open()->check({"large"})) << "the job goes on";
  client->leave_job({});
}

/// Makes the calls of store_oracle.py and returns its output.
std::string answers_of(Store& store, const std::vector<std::string>& calls) {
  std::ostringstream answers;
  for (const auto& call : calls) {
    std::istringstream in(call);
    std::string name;
    in >> name;
    const std::vector<std::string> words{std::istream_iterator<std::string>(in), {}};
    if (name == "set") store.set(words.at(0), words.at(1));
    if (name == "delete_key") store.erase(words.at(0));
    if (name == "append") store.append(words.at(0), words.at(1));
    if (name == "multi_set") {
      std::vector<std::pair<std::string, std::string>> values;
      for (size_t i = 0; i < words.size(); i += 2) values.emplace_back(words[i], words[i + 1]);
      store.multi_set(values);
    }
    if (name != "multi_get") continue;
    answers << "=";
    try {
      for (const auto& value : store.multi_get(words, 100ms)) answers << ' ' << value;
    } catch (const TimeoutError&) {
      answers << " timed out";
    }
    answers << '\n';
  }
  return answers.str();
}

TEST(StoreRequest, IsAnsweredAsInPython) {
  const char* python = std::getenv("LOCKSTEP_TEST_PYTHON_2X");
  if (!python || !*python)
    GTEST_SKIP() << "needs Python's torch 2.x, whose store has these calls: set LOCKSTEP_TEST_PYTHON_2X";
  const std::vector<std::string> calls{
      "append log a",        "append log bc",   "multi_get log",   "multi_set x 1 y 2 x 3",
      "multi_get y x log y", "set x old",       "append x er",     "multi_get x",
      "multi_get x none",    "multi_set",       "multi_get",       "delete_key x",
      "append x new",        "multi_get x log", "multi_set log 7", "multi_get log y log"};
  std::vector<std::string> command{python, std::string(LOCKSTEP_TEST_SOURCE_DIR) + "/rendezvous/store_oracle.py"};
  command.insert(command.end(), calls.begin(), calls.end());
  RankProcess process(command, {});
  ASSERT_EQ(process.wait(), 0) << process.output();
  std::string expected;
  std::istringstream lines(process.output());
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with("=")) expected += line + '\n';
  ASSERT_EQ(std::count(expected.begin(), expected.end(), '\n'), 7) << process.output();
  EXPECT_EQ(answers_of(*make_memory_store(), calls), expected);
  EXPECT_EQ(answers_of(*StoreHost().open(), calls), expected);
}

}  // namespace
}  // namespace lockstep
