#include "rendezvous/net/peer_connector.h"

#include <sys/socket.h>

#include <future>
#include <stdexcept>

#include <lockstep/error.h>

#include "rendezvous/net/peer_proof.h"
#include "rendezvous/store/protocol.h"
#include "support/eventually.h"
#include "support/log_lines.h"
#include "support/loopback.h"
#include "support/messages.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::Contains;
using testing::HasSubstr;
using Clock = std::chrono::steady_clock;
using Sockets = std::vector<FileDescriptor>;

std::string hear_exactly(const FileDescriptor& socket, size_t bytes) {
  std::string heard(bytes, '\0');
  for (size_t got = 0; got < bytes;) {
    if (!is_readable(socket, 20s)) return "silence";
    const ssize_t more = ::recv(socket.get(), heard.data() + got, bytes - got, 0);
    if (more <= 0) return "the end";
    got += static_cast<size_t>(more);
  }
  return heard;
}

/// Both ends of every connection belong to the ranks that they are said to belong to.
void expect_connected(const std::vector<Sockets>& ranks) {
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    for (size_t peer = 0; peer < ranks.size(); ++peer) {
      if (peer == rank) continue;
      const auto words = std::to_string(rank) + ">" + std::to_string(peer);
      ASSERT_EQ(::send(ranks[rank][peer].get(), words.data(), words.size(), MSG_NOSIGNAL), 3);
    }
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    for (size_t peer = 0; peer < ranks.size(); ++peer) {
      if (peer != rank) {
        EXPECT_EQ(hear_exactly(ranks[rank][peer], 3), std::to_string(peer) + ">" + std::to_string(rank));
      }
    }
}

/// Ranks of one group, each connecting on a thread of its own once it is started.
class Peers : public testing::Test {
 protected:
  PeerConnector& make(int rank, int size, std::chrono::milliseconds timeout = 20s) {
    connectors_.push_back(std::make_unique<PeerConnector>(PeerConnector::Options{.rank = rank,
                                                                                 .size = size,
                                                                                 .host = "127.0.0.1",
                                                                                 .store = store_,
                                                                                 .timeout = timeout,
                                                                                 .remedy = "try elsewhere"}));
    return *connectors_.back();
  }

  std::future<Sockets> start(int rank, int size, std::chrono::milliseconds timeout = 20s) {
    return std::async(std::launch::async, [&connector = make(rank, size, timeout)] { return connector.connect(); });
  }

  /// As soon as the rank listens.
  int port_of_rank(int rank) { return parse_endpoint(entry(rank).at(0)).port; }
  Secret key_of_rank(int rank) { return Secret::from_bytes(entry(rank).at(1)); }
  std::vector<std::string> entry(int rank) { return unpack(store_->get("listener/" + std::to_string(rank), 20s)); }

  /// A connection to the rank, whose challenge has been read.
  FileDescriptor call(int rank, std::string& challenge) {
    auto socket = connect_to({"127.0.0.1", port_of_rank(rank)}, Clock::now() + 20s);
    challenge = hear_exactly(socket, peer_proof::kChallengeBytes);
    return socket;
  }

  static void say(const FileDescriptor& socket, const std::string& words) {
    ASSERT_EQ(::send(socket.get(), words.data(), words.size(), MSG_NOSIGNAL), static_cast<ssize_t>(words.size()));
  }

  LogLines log_;
  std::shared_ptr<Store> store_ = make_memory_store();
  std::vector<std::unique_ptr<PeerConnector>> connectors_;
};

TEST_F(Peers, EachIsConnectedWithEveryOther) {
  for (int size : {1, 2, 5}) {
    store_ = make_memory_store();
    std::vector<std::future<Sockets>> starting;
    for (int rank = 0; rank < size; ++rank) starting.push_back(start(rank, size));
    std::vector<Sockets> ranks;
    for (auto& rank : starting) ranks.push_back(rank.get());
    expect_connected(ranks);
    EXPECT_THAT(log_.lines(), testing::IsEmpty());
  }
}

TEST_F(Peers, AreConnectedThoughStrangersCameFirst) {
  auto zero = start(0, 2);
  std::vector<Stranger> strangers;
  const int port = port_of_rank(0);
  for (const std::string words : {"", "x", "GET / HTTP/1.0\r\n\r\n"}) {
    strangers.emplace_back(port);
    strangers.back().say(words);
  }
  Stranger garbage(port);
  garbage.say(std::string(300, '\xff'));
  EXPECT_TRUE(garbage.is_cut_off_within(1s));
  EXPECT_EQ(garbage.heard().size(), peer_proof::kChallengeBytes) << "no more than the challenge";
  auto one = start(1, 2);
  std::vector<Sockets> ranks;
  ranks.push_back(zero.get());
  ranks.push_back(one.get());
  expect_connected(ranks);
  EXPECT_TRUE(eventually([&] { return !log_.lines().empty(); }));
  EXPECT_THAT(log_.lines(), Contains(HasSubstr("rank 0 rejected a connection from 127.0.0.1:")));
  for (auto& stranger : strangers) EXPECT_TRUE(stranger.is_cut_off_within(1s));
}

TEST_F(Peers, CutOffWhoSaysNothingForTwoSeconds) {
  auto zero = start(0, 2);
  const auto begin = Clock::now();
  Stranger silent(port_of_rank(0));
  EXPECT_TRUE(silent.is_cut_off_within(4s));
  EXPECT_GT(Clock::now() - begin, 1900ms);
  auto one = start(1, 2);
  EXPECT_NO_THROW((zero.get(), one.get()));
  EXPECT_TRUE(eventually([&] { return !log_.lines().empty(); }));  // a thread of its own writes the log
  EXPECT_THAT(log_.lines(), Contains(HasSubstr("within 2 s")));
}

TEST_F(Peers, CutOffTheOldestOfTooManyStrangers) {
  auto zero = start(0, 2);
  std::vector<Stranger> strangers;
  for (int i = 0; i < 66; ++i) strangers.emplace_back(port_of_rank(0));
  EXPECT_FALSE(strangers[0].is_cut_off_within(0ms));
  strangers.emplace_back(port_of_rank(0));
  EXPECT_TRUE(strangers[0].is_cut_off_within(1s));
  EXPECT_FALSE(strangers[1].is_cut_off_within(0ms));
  auto one = start(1, 2);
  EXPECT_NO_THROW((zero.get(), one.get()));
}

TEST_F(Peers, RefuseAProofWithAnotherKey) {
  auto zero = start(0, 2);
  std::string challenge;
  const auto socket = call(0, challenge);
  say(socket, peer_proof::Connector(Secret::random(), 1, 0).answer(challenge));
  EXPECT_EQ(hear_exactly(socket, 1), "the end");
  auto one = start(1, 2);
  std::vector<Sockets> ranks;
  ranks.push_back(zero.get());
  ranks.push_back(one.get());
  expect_connected(ranks);
}

TEST_F(Peers, RefuseAReplayedProof) {
  auto zero = start(0, 3);
  const auto key = key_of_rank(0);
  std::string challenge;
  auto honest = call(0, challenge);
  peer_proof::Connector connector(key, 1, 0);
  const auto answer = connector.answer(challenge);
  say(honest, answer);
  EXPECT_TRUE(connector.check(hear_exactly(honest, peer_proof::kProofBytes)));
  const auto replay = call(0, challenge);
  say(replay, answer);
  EXPECT_EQ(hear_exactly(replay, 1), "the end");
  connectors_[0]->give_up(std::make_exception_ptr(std::runtime_error("enough")));
  EXPECT_THROW(zero.get(), std::runtime_error);
}

TEST_F(Peers, RefuseARankThatDoesNotConnectToThisOne) {
  auto zero = start(0, 2);
  for (int wrong : {0, 2, -1}) {
    std::string challenge;
    const auto socket = call(0, challenge);
    say(socket, peer_proof::Connector(key_of_rank(0), wrong, 0).answer(challenge));
    EXPECT_EQ(hear_exactly(socket, 1), "the end");
  }
  connectors_[0]->give_up(std::make_exception_ptr(std::runtime_error("enough")));
  EXPECT_THROW(zero.get(), std::runtime_error);
}

TEST_F(Peers, DoNotWaitWhereNobodyListens) {
  store_->set("listener/0", pack({"127.0.0.1:1", Secret::random().bytes()}));
  expect_error<PeerError>([&] { make(1, 2).connect(); },
                          "could not connect to rank 0 at 127.0.0.1:1: Connection refused", "try elsewhere");
}

// Rank 0 is gone, and its port is another's.
TEST_F(Peers, RefuseAListenerThatDoesNotKnowTheKey) {
  const std::string nonce = random_bytes(peer_proof::kChallengeBytes);
  SideServer impostor([&](const FileDescriptor& socket) {
    say(socket, nonce);
    const auto answer = hear_exactly(socket, peer_proof::kAnswerBytes);
    if (answer.size() != peer_proof::kAnswerBytes) return;
    say(socket, answer.substr(answer.size() - peer_proof::kProofBytes));  // its own proof back
  });
  store_->set("listener/0", pack({"127.0.0.1:" + std::to_string(impostor.port()), Secret::random().bytes()}));
  auto one = start(1, 2, 1900ms);
  expect_error<TimeoutError>([&] { one.get(); }, "could not connect to rank 0 at 127.0.0.1:", "within 1900 ms",
                             "does not know the job's secret", "try elsewhere");
  EXPECT_GE(impostor.accepted(), 2) << "it tries again";
}

TEST_F(Peers, ConnectAgainWhenTheyAreCutOff) {
  std::promise<int> port;
  std::atomic<int> cut{0};
  SideServer gate([&, to = port.get_future().share()](const FileDescriptor& client) {
    if (++cut <= 2) return;  // as a listener does that has too many strangers
    const auto server = connect_to({"127.0.0.1", to.get()}, Clock::now() + 20s);
    say(client, hear_exactly(server, peer_proof::kChallengeBytes));
    say(server, hear_exactly(client, peer_proof::kAnswerBytes));
    say(client, hear_exactly(server, peer_proof::kProofBytes));
  });
  auto zero = start(0, 2);
  port.set_value(port_of_rank(0));
  store_->set("listener/0", pack({"127.0.0.1:" + std::to_string(gate.port()), key_of_rank(0).bytes()}));
  auto one = start(1, 2);
  EXPECT_NO_THROW((one.get(), zero.get()));
  EXPECT_EQ(cut, 3);
}

TEST_F(Peers, NameTheRanksThatDoNotCome) {
  auto zero = start(0, 4, 300ms);
  std::string challenge;
  const auto socket = call(0, challenge);
  say(socket, peer_proof::Connector(key_of_rank(0), 2, 0).answer(challenge));
  EXPECT_EQ(hear_exactly(socket, peer_proof::kProofBytes).size(), peer_proof::kProofBytes);
  expect_error<TimeoutError>([&] { zero.get(); }, "rank 1 and 3 did not connect to 127.0.0.1:", "within 300 ms",
                             "0 unauthenticated connections", "try elsewhere");
  store_->erase("listener/0");
  expect_error<TimeoutError>([&] { make(1, 4, 300ms).connect(); }, "rank 0 did not publish an address within 300 ms");
  expect_error<TimeoutError>([&] { make(3, 4, 300ms).connect(); }, "ranks 0 and 2 did not publish an address within");
}

TEST_F(Peers, GiveUpWhereverTheyWait) {
  auto accepting = start(0, 2);
  port_of_rank(0);
  const auto bell = std::make_exception_ptr(std::runtime_error("the job is over"));
  connectors_[0]->give_up(bell);
  EXPECT_THROW(accepting.get(), std::runtime_error);

  SideServer silent([&](const FileDescriptor& socket) { hear_exactly(socket, 1); });
  store_->set("listener/0", pack({"127.0.0.1:" + std::to_string(silent.port()), Secret::random().bytes()}));
  auto connecting = start(1, 2);
  port_of_rank(1);
  connectors_[1]->give_up(bell);
  connectors_[1]->give_up(std::make_exception_ptr(std::logic_error("a later cause")));
  EXPECT_THROW(connecting.get(), std::runtime_error);
}

TEST_F(Peers, SayWhereTheyCannotListen) {
  expect_error<SystemError>(
      [&] { PeerConnector({.rank = 0, .size = 2, .host = "192.0.2.1", .store = store_, .remedy = "try elsewhere"}); },
      "listen at 192.0.2.1:0", "try elsewhere");
}

TEST(PeerProof, DependsOnKeyRanksNoncesAndSide) {
  const auto key = Secret::random();
  const peer_proof::Listener listener(key, 3);
  peer_proof::Connector connector(key, 7, 3);
  const auto answer = connector.answer(listener.challenge());
  const auto accepted = listener.check(answer);
  ASSERT_TRUE(accepted);
  EXPECT_EQ(accepted->rank, 7);
  EXPECT_TRUE(connector.check(accepted->proof));

  EXPECT_FALSE(peer_proof::Listener(key, 3).check(answer)) << "another nonce";
  EXPECT_FALSE(listener.check(peer_proof::Connector(Secret::random(), 7, 3).answer(listener.challenge())));
  EXPECT_FALSE(listener.check(peer_proof::Connector(key, 7, 4).answer(listener.challenge()))) << "for another rank";
  EXPECT_FALSE(connector.check(answer.substr(36))) << "its own proof";
  EXPECT_FALSE(listener.check(""));
  for (size_t at = 0; at < answer.size(); ++at) {
    auto wrong = answer;
    wrong[at] ^= 1;
    EXPECT_FALSE(listener.check(wrong)) << at;
  }
}

}  // namespace
}  // namespace lockstep
