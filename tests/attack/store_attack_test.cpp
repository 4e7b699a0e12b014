// The store of a job that trains, against connections and bytes that do not come from the job's ranks.

#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <fstream>
#include <future>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/error.h>

#include "attack/attacked_job.h"
#include "rendezvous/net/secret.h"
#include "rendezvous/net/socket.h"
#include "rendezvous/store/store_client.h"
#include "rendezvous/store/tcp_store.h"
#include "support/loopback.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

std::string random_text(std::mt19937& random, size_t size) {
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

/// Forwards connections to a port one after the other, and inverts one bit of the first one's data for that port.
class FlippingRelay {
 public:
  FlippingRelay(int port, size_t byte, int bit)
      : byte_(byte), bit_(bit), server_([this, port](const FileDescriptor& client) { carry(client, port); }) {}
  ~FlippingRelay() { should_end_ = true; }

  int port() const { return server_.port(); }
  bool has_flipped() const { return has_flipped_; }

 private:
  void carry(const FileDescriptor& client, int port) {
    FileDescriptor server;
    try {
      server = connect_to({"127.0.0.1", port}, Clock::now() + 2s);
    } catch (const Error&) {  // the client then finds its connection closed
      return;
    }
    while (!should_end_) {
      std::array<pollfd, 2> ready{{{client.get(), POLLIN, 0}, {server.get(), POLLIN, 0}}};
      if (::poll(ready.data(), ready.size(), 10) <= 0) continue;
      if (ready[0].revents != 0 && !move(client, server, true)) return;
      if (ready[1].revents != 0 && !move(server, client, false)) return;
    }
  }

  bool move(const FileDescriptor& from, const FileDescriptor& to, bool is_to_server) {
    std::array<char, 16 << 10> bytes;
    const ssize_t got = ::recv(from.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got <= 0) return false;
    const auto size = static_cast<size_t>(got);
    if (is_to_server && !has_flipped_ && byte_ < passed_ + size) {
      bytes[byte_ - passed_] = static_cast<char>(bytes[byte_ - passed_] ^ (1 << bit_));
      has_flipped_ = true;
    }
    if (is_to_server) passed_ += size;
    return ::send(to.get(), bytes.data(), size, MSG_NOSIGNAL) == got;
  }

  const size_t byte_;
  const int bit_;
  size_t passed_ = 0;  // used by the server's thread only
  std::atomic<bool> has_flipped_{false};
  std::atomic<bool> should_end_{false};
  SideServer server_;
};

/// A job that trains, and the way to its store for a process that knows the job's secret.
class StoreAttack : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(job_.advances()) << job_.process().output();
    port_ = std::stoi(job_.variable(0, "MASTER_PORT"));
    key_ = Secret::from_file(job_.variable(0, "LOCKSTEP_SECRET_FILE")).key(0);
  }

  /// A client of the store that gives up after a few seconds.
  std::shared_ptr<Store> open_store(int port) const {
    StoreClient::Options options{{"127.0.0.1", port}, key_};
    options.deadline = Clock::now() + 4s;
    options.heartbeat_limit = 1s;
    return make_remote_store(std::make_shared<StoreClient>(options));
  }

  /// The requests of one client; each is checked where the store answers.
  static void use_store(Store& store, const std::string& name) {
    store.set("attack/value/" + name, "the value of " + name);
    EXPECT_EQ(store.add("attack/count/" + name, 1), 1);
    EXPECT_EQ(store.get("attack/value/" + name, 3s), "the value of " + name);
  }

  /// Each key of the client is missing, or has its value.
  static void expect_no_wrong_value(Store& store, const std::string& name) {
    if (store.check({"attack/value/" + name})) {
      EXPECT_EQ(store.get("attack/value/" + name, 3s), "the value of " + name);
    }
    EXPECT_THAT(store.add("attack/count/" + name, 0), testing::AnyOf(0, 1)) << name;
  }

  std::mt19937 random_ = attack_random();
  AttackedJob job_{{.ranks = 2, .backend = "gloo"}};
  int port_ = 0;
  Secret key_ = Secret::random();  // of the store, after SetUp()
};

/// Raises the limit of open files of this process. Returns whether it is at least `files`.
bool allow_files(rlim_t files) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return false;
  limit.rlim_cur = std::min(std::max(limit.rlim_cur, files), limit.rlim_max);
  return ::setrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur >= files;
}

TEST_F(StoreAttack, ByFloodsDoesNotDisturbTheTraining) {
  constexpr size_t kHalfOpen = 2000, kMinGarbage = 4000;
  constexpr auto kMinTime = 7s;  // longer than the heartbeat limit: a rank that the store cannot hear would be lost
  if (!allow_files(kHalfOpen + 200)) GTEST_SKIP() << "too few open files are allowed: ulimit -n 2200";
  const std::string hello("\x16\x03\x01\x40\x00", 5);  // the start of a TLS message that promises 16 KiB
  auto garbage = std::async(std::launch::async, [&, random = std::mt19937(random_())]() mutable {
    size_t sent = 0;
    for (const auto start = Clock::now(); sent < kMinGarbage || Clock::now() - start < kMinTime; ++sent)
      Stranger(port_).say(random_text(random, random() % 8192));
    return sent;
  });
  std::vector<Stranger> half_open;
  for (size_t i = 0; i < kHalfOpen; ++i) {
    half_open.emplace_back(port_);
    if (i % 2 == 1) half_open.back().say(hello);
    if (i % 500 == 0) {
      EXPECT_TRUE(job_.advances(1, 10s)) << "after " << i << " connections";
    }
  }
  while (garbage.wait_for(0s) != std::future_status::ready)
    ASSERT_TRUE(job_.advances(1, 10s)) << job_.process().output();
  std::cout << kHalfOpen << " half-open connections, " << garbage.get() << " with garbage\n";
  EXPECT_TRUE(job_.advances(20)) << job_.process().output();
  for (auto& stranger : half_open) ASSERT_TRUE(stranger.is_cut_off_within(10s));
  job_.expect_right_results();
}

TEST_F(StoreAttack, ByReplaysChangesNothing) {
  std::string said;
  {
    Relay relay(port_);
    use_store(*open_store(relay.port()), "recorded");
    said = relay.said();
  }
  ASSERT_GT(said.size(), 300u);
  auto honest = open_store(port_);
  for (int replay = 0; replay < 200; ++replay) {
    Stranger stranger(port_);
    const size_t piece = replay % 4 == 0 ? said.size() : 1 + random_() % said.size();
    for (size_t at = 0; at < said.size(); at += piece)
      if (!stranger.say(std::string_view(said).substr(at, piece))) break;
    ASSERT_TRUE(stranger.is_cut_off_within(3s)) << "replay " << replay;
    ASSERT_EQ(honest->add("attack/count/recorded", 0), 1) << "replay " << replay;
  }
  EXPECT_EQ(honest->get("attack/value/recorded", 3s), "the value of recorded");
  EXPECT_TRUE(job_.advances(20));
  honest.reset();
  job_.expect_right_results();
}

TEST_F(StoreAttack, ByBitFlipsCausesErrorsOnly) {
  constexpr int kFlips = 200, kAtOnce = 8;
  int clients = 0;
  size_t stream_bytes = 0;
  {
    Relay relay(port_);
    use_store(*open_store(relay.port()), "measured");
    stream_bytes = relay.said().size();
  }
  std::atomic<int> flipped{0}, failed{0};
  auto attack = [&](int client, size_t byte, int bit) {
    FlippingRelay relay(port_, byte, bit);
    try {
      use_store(*open_store(relay.port()), std::to_string(client));
    } catch (const Error&) {
      ++failed;
    }
    if (relay.has_flipped()) ++flipped;
  };
  while (flipped < kFlips && clients < 3 * kFlips) {  // a client that ends early may not send the byte
    std::vector<std::future<void>> attacks;
    for (int i = 0; i < kAtOnce; ++i)
      attacks.push_back(std::async(std::launch::async, attack, clients++, random_() % stream_bytes, random_() % 8));
    for (auto& one : attacks) EXPECT_NO_THROW(one.get()) << "an error of another type";
  }
  std::cout << flipped << " bits were flipped, " << failed << " of " << clients << " clients failed\n";
  EXPECT_GE(flipped, kFlips);
  EXPECT_GT(failed, kFlips / 2);
  auto honest = open_store(port_);
  for (int client = 0; client < clients; ++client) expect_no_wrong_value(*honest, std::to_string(client));
  honest.reset();
  EXPECT_TRUE(job_.advances(20)) << job_.process().output();
  job_.expect_right_results();
}

}  // namespace
}  // namespace lockstep
