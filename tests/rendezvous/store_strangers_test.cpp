#include <sys/resource.h>

#include <atomic>
#include <future>

#include <lockstep/error.h>

#include "base/log.h"
#include "support/eventually.h"
#include "support/log_lines.h"
#include "support/loopback.h"
#include "support/messages.h"
#include "support/stolen_time.h"
#include "support/store_host.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;
using testing::IsEmpty;
using Clock = std::chrono::steady_clock;

/// The start of a message of TLS that promises 16 KiB.
const std::string kPromise("\x16\x03\x01\x40\x00", 5);

/// Two clients that work all the time; none of what they do may fail or take long.
class HonestTraffic {
 public:
  explicit HonestTraffic(const StoreHost& host) {
    for (int client : {0, 1})
      clients_.push_back(std::async(std::launch::async, [this, client, store = host.open()] { work(*store, client); }));
  }
  ~HonestTraffic() {
    should_end_ = true;
    for (auto& client : clients_) EXPECT_NO_THROW(client.get());
    EXPECT_GT(rounds_, 2);
    EXPECT_LT(slowest_.load().count(), 1000) << "ms for one operation";
  }

 private:
  void work(Store& store, int client) {
    for (int round = 0; !should_end_ || round < 2; ++round, ++rounds_) {
      const Stopwatch watch;
      const auto value = std::to_string(round);
      store.set("round/" + std::to_string(client), value);
      EXPECT_EQ(store.get("round/" + std::to_string(client), 10s), value);
      const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(watch.unstolen());
      if (took > slowest_.load()) slowest_ = took;
      std::this_thread::sleep_for(1ms);  // two processors: leave some to the strangers
    }
  }

  std::atomic<bool> should_end_{false};
  std::atomic<int> rounds_{0};
  std::atomic<std::chrono::milliseconds> slowest_{0ms};
  std::vector<std::future<void>> clients_;
};

/// A store with honest clients at work, and whoever else a test sends there.
class StoreStrangers : public testing::Test {
 protected:
  Stranger stranger() const { return Stranger(host_.server.port()); }

  LogLines log_;
  StoreHost host_;
  HonestTraffic traffic_{host_};
};

TEST_F(StoreStrangers, AreCutOffWhenTheyTalkGarbage) {
  for (const std::string& garbage : {std::string("GET / HTTP/1.1\r\nHost: store\r\n\r\n"), std::string(300, '\0'),
                                     std::string(300, '\xff'), std::string("\x16\x03\x01\x00\x05hello", 10)}) {
    auto one = stranger();
    one.say(garbage);
    EXPECT_TRUE(one.is_cut_off_within(1s)) << garbage;
    EXPECT_LT(one.heard().size(), 16u);  // an alert at most
  }
}

TEST_F(StoreStrangers, AreCutOffAfterTwoSecondsOfSilence) {
  const Stopwatch watch;
  auto one = stranger();
  EXPECT_TRUE(one.is_cut_off_within(4s));
  EXPECT_GT(watch.elapsed(), 1900ms);
  EXPECT_THAT(one.heard(), IsEmpty());
  EXPECT_TRUE(eventually([&] { return !log_.lines().empty(); }));
  EXPECT_THAT(log_.lines(), testing::Contains(HasSubstr("within 2 s")));
}

TEST_F(StoreStrangers, AreCutOffAfterTwoSecondsOfSlowBytes) {
  const Stopwatch watch;
  auto one = stranger();
  one.say(kPromise);
  while (!one.is_cut_off_within(100ms) && watch.elapsed() < 5s) one.say("x");
  EXPECT_GT(watch.elapsed(), 1900ms);
  EXPECT_LT(watch.unstolen(), 4s);
}

TEST_F(StoreStrangers, AreCutOffAfterFourKilobytes) {
  auto modest = stranger();
  modest.say(kPromise + std::string(4090, 'x'));
  EXPECT_FALSE(modest.is_cut_off_within(300ms));
  auto one = stranger();
  one.say(kPromise + std::string(4995, 'x'));
  EXPECT_TRUE(one.is_cut_off_within(1s));
  EXPECT_THAT(one.heard(), IsEmpty());
  modest.say("x");
  EXPECT_TRUE(modest.is_cut_off_within(1s));
}

TEST_F(StoreStrangers, AreCutOffWithAnotherSecret) {
  auto options = client_options(host_.server.port());
  options.key = Secret::random().key(0);
  for (int i = 0; i < 20; ++i) EXPECT_THROW(StoreClient{options}, PeerError);
}

TEST_F(StoreStrangers, CannotReplayWhatAnHonestClientSaid) {
  std::string said;
  {
    Relay relay(host_.server.port());
    auto honest = make_remote_store(std::make_shared<StoreClient>(client_options(relay.port())));
    EXPECT_EQ(honest->add("times", 1), 1);
    said = relay.said();
  }
  ASSERT_GT(said.size(), 300u);
  auto at_once = stranger();
  at_once.say(said);
  EXPECT_TRUE(at_once.is_cut_off_within(1s));
  auto in_pieces = stranger();
  for (size_t at = 0; at < said.size(); at += 50) {
    in_pieces.say(std::string_view(said).substr(at, 50));
    in_pieces.is_cut_off_within(1ms);
  }
  EXPECT_TRUE(in_pieces.is_cut_off_within(1s));
  EXPECT_EQ(host_.open()->add("times", 0), 1);
}

TEST_F(StoreStrangers, GoInTheOrderInWhichTheyCame) {
  auto honest = host_.open();
  auto new_stranger = [&] {
    auto one = stranger();
    one.say(kPromise);
    for (int look : {1, 2})
      honest->check({std::to_string(look)});  // the store accepts at one look and reads at the next
    return one;
  };
  auto first = new_stranger(), second = new_stranger();
  auto silent = stranger();  // a rank that has just connected
  honest->check({});
  std::vector<Stranger> others;
  for (int i = 0; i < 61; ++i) others.push_back(new_stranger());
  EXPECT_FALSE(first.is_cut_off_within(0ms)) << "64 have room";
  others.push_back(new_stranger());
  EXPECT_TRUE(first.is_cut_off_within(1s));
  EXPECT_FALSE(second.is_cut_off_within(0ms));
  others.push_back(new_stranger());
  EXPECT_TRUE(second.is_cut_off_within(1s));
  EXPECT_FALSE(silent.is_cut_off_within(0ms));
}

TEST_F(StoreStrangers, OfOneAddressDoNotDisplaceThoseOfAnother) {
  auto rank = stranger();
  std::vector<Stranger> flood;
  for (int i = 0; i < 70; ++i) flood.emplace_back(host_.server.port(), 2);
  EXPECT_TRUE(flood[0].is_cut_off_within(1s));
  EXPECT_FALSE(rank.is_cut_off_within(0ms)) << "older, but the only one of its address";
}

TEST_F(StoreStrangers, AreNamedOnceASecondAtMost) {
  // Lines are written in order, so after this one there are none of the stores of other tests.
  log_warning_async("first line");
  ASSERT_TRUE(eventually([&] { return !log_.lines().empty() && log_.lines().back().ends_with("first line"); }));
  const auto earlier = static_cast<std::ptrdiff_t>(log_.lines().size());
  const auto lines_of_this_store = [&] {
    const auto all = log_.lines();
    return std::vector(all.begin() + earlier, all.end());
  };
  const Stopwatch watch;
  while (lines_of_this_store().size() < 2 && watch.elapsed() < 20s) {
    auto one = stranger();
    one.say("garbage that is long enough");
    ASSERT_TRUE(one.is_cut_off_within(2s));
  }
  const auto lines = lines_of_this_store();
  ASSERT_GE(lines.size(), 2u);
  EXPECT_LE(lines.size(), 2 + static_cast<size_t>(watch.elapsed() / 1s));
  EXPECT_THAT(lines.front(), HasSubstr("the store rejected a connection from 127.0.0.1:"));
  EXPECT_THAT(lines.back(), HasSubstr("more since the last such line"));
}

// Ten thousand, each doing what strangers do, with room for new honest clients all the time.
TEST_F(StoreStrangers, CannotKeepHonestClientsOut) {
  rlimit files{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &files), 0);
  const size_t batch = std::min<size_t>(400, files.rlim_cur / 4);
  std::atomic<bool> is_over = false;
  auto flood = std::async(std::launch::async, [&] {
    const std::array<std::string, 4> words{"", "x", "garbage that is long enough", kPromise};
    for (size_t sent = 0; sent < 10000; sent += batch) {
      std::vector<Stranger> strangers;
      for (size_t i = 0; i < batch; ++i) {
        strangers.push_back(stranger());
        strangers.back().say(words[i % words.size()]);
      }
    }
    is_over = true;
  });
  int joined = 0;
  do {
    auto store = host_.open();
    EXPECT_EQ(store->add("joined", 1), ++joined);
  } while (!is_over);
  flood.get();
  EXPECT_GE(joined, 3);
}

}  // namespace
}  // namespace lockstep
