#include "backends/gloo/socket_exchange.h"

#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/error.h>

#include "support/eventually.h"
#include "support/messages.h"

namespace lockstep::gloo_backend {
namespace {

using namespace std::chrono_literals;

constexpr size_t kMoreThanSocketsHold = 16 << 20;

Deadline in(std::chrono::milliseconds time) {
  return std::chrono::steady_clock::now() + time;
}

/// Whether a thread of this process is blocked in a system call.
bool is_asleep(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  std::string number, name, state;
  file >> number >> name >> state;
  return state == "S";
}

/// Two ranks of one process, connected by a pair of sockets.
class SocketExchangeTest : public testing::Test {
 protected:
  SocketExchangeTest() {
    int ends[2] = {-1, -1};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    std::vector<FileDescriptor> of_rank_0(2), of_rank_1(2);
    of_rank_0[1] = FileDescriptor(ends[0]);
    of_rank_1[0] = FileDescriptor(ends[1]);
    ranks_.push_back(std::make_unique<SocketExchange>(std::move(of_rank_0)));
    ranks_.push_back(std::make_unique<SocketExchange>(std::move(of_rank_1)));
  }

  SocketExchange::Request send(int rank, std::string& data, uint64_t slot) {
    return ranks_[rank]->start(Direction::kSend, {1 - rank, data.data(), data.size()}, slot);
  }
  SocketExchange::Request receive(int rank, std::string& data, uint64_t slot) {
    return ranks_[rank]->start(Direction::kRecv, {1 - rank, data.data(), data.size()}, slot);
  }

  std::vector<std::unique_ptr<SocketExchange>> ranks_;
};

TEST_F(SocketExchangeTest, FramesFindTheReceiveOfTheirSlot) {
  std::string first(3, 'a'), second(70'000, 'b'), third(5000, 'c'), fourth(1, 'd');
  std::string into_first(3, ' '), into_second(70'000, ' '), into_third(5000, ' '), into_fourth(1, ' ');
  auto r4 = receive(1, into_fourth, 1), r2 = receive(1, into_second, 2), r1 = receive(1, into_first, 3),
       r3 = receive(1, into_third, 3);
  auto s1 = send(0, first, 3), s2 = send(0, second, 2), s3 = send(0, third, 3), s4 = send(0, fourth, 1);
  for (auto* request : {&s1, &s2, &s3, &s4}) ranks_[0]->finish(*request, in(10s));
  for (auto* request : {&r4, &r3, &r2, &r1}) ranks_[1]->finish(*request, in(10s));
  EXPECT_EQ(into_first, first);
  EXPECT_TRUE(into_second == second);
  EXPECT_TRUE(into_third == third);
  EXPECT_EQ(into_fourth, fourth);
}

TEST_F(SocketExchangeTest, RanksThatSendMoreThanSocketsHoldDoNotBlockEachOther) {
  auto exchange = [&](int rank) {
    std::string data(kMoreThanSocketsHold, ' '), received(kMoreThanSocketsHold, ' ');
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(i * 31 + i / 4093 + rank);
    auto sent = send(rank, data, 1);
    auto into = receive(rank, received, 1);
    ranks_[rank]->finish(sent, in(60s));
    ranks_[rank]->finish(into, in(60s));
    for (size_t i = 0; i < data.size(); ++i)
      if (received[i] != static_cast<char>(i * 31 + i / 4093 + 1 - rank)) return i;
    return data.size();
  };
  auto other = std::async(std::launch::async, exchange, 1);
  EXPECT_EQ(exchange(0), kMoreThanSocketsHold);
  EXPECT_EQ(other.get(), kMoreThanSocketsHold);
}

TEST_F(SocketExchangeTest, AFrameWaitsUntilItsReceiveStarts) {
  std::string data = "for slot 7", other(10, '.'), received(10, '.');
  auto sent = send(0, data, 7);
  ranks_[0]->finish(sent, in(10s));
  {
    auto different = receive(1, other, 8);
    expect_error<TimeoutError>([&] { ranks_[1]->finish(different, in(20ms)); }, "timed out: rank 0 did not send");
    EXPECT_EQ(other, "..........") << "data must not move between different calls";
  }
  auto same = receive(1, received, 7);
  ranks_[1]->finish(same, in(10s));
  EXPECT_EQ(received, data);
}

TEST_F(SocketExchangeTest, ASendThatNobodyReceivesTimesOut) {
  std::string data(kMoreThanSocketsHold, 'x');
  auto sent = send(0, data, 1);
  expect_error<TimeoutError>([&] { ranks_[0]->finish(sent, in(20ms)); }, "timed out: rank 1 did not receive");
}

TEST_F(SocketExchangeTest, DataArrivesThoughTheSenderHasLeft) {
  std::string data(1000, 'x'), received(1000, ' '), more(1, ' ');
  {
    auto sent = send(0, data, 1);
    ranks_[0]->finish(sent, in(10s));
  }
  ranks_[0].reset();
  auto into = receive(1, received, 1);
  ranks_[1]->finish(into, in(10s));
  EXPECT_EQ(received, data);
  auto nothing = receive(1, more, 1);
  expect_error<PeerError>([&] { ranks_[1]->finish(nothing, in(10s)); }, "the connection to rank 0 is broken");
}

TEST_F(SocketExchangeTest, ASendToARankThatLeftIsAPeerError) {
  ranks_[1].reset();
  std::string data(kMoreThanSocketsHold, 'x');
  auto send_all = [&] {
    auto sent = send(0, data, 1);
    ranks_[0]->finish(sent, in(10s));
  };
  expect_error<PeerError>(send_all, "the connection to rank 1 is broken");
}

TEST_F(SocketExchangeTest, AnAbortWakesThisRankAndTheOther) {
  std::string data(1, 'x'), here(1, ' '), there(1, ' ');
  auto sent = send(1, data, 7);  // nobody receives it, so that rank 0 does not poll the socket
  ranks_[1]->finish(sent, in(10s));
  std::atomic<pid_t> blocked_thread{0};
  auto blocked = std::async(std::launch::async, [&] {
    auto request = receive(0, here, 1);
    blocked_thread = ::gettid();
    expect_error<UsageError>([&] { ranks_[0]->finish(request, in(60s)); }, "the cause");
  });
  ASSERT_TRUE(eventually([&] { return is_asleep(blocked_thread); }));
  const auto begin = std::chrono::steady_clock::now();
  ranks_[0]->abort(std::make_exception_ptr(UsageError("the cause")));
  ranks_[0]->abort(std::make_exception_ptr(UsageError("a later cause")));
  blocked.get();
  auto request = receive(1, there, 1);
  expect_error<PeerError>([&] { ranks_[1]->finish(request, in(60s)); }, "the connection to rank 0 is broken");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 30s);
  expect_error<UsageError>([&] { send(0, here, 1); }, "the cause");
}

TEST_F(SocketExchangeTest, AMessageThatIsGivenUpHalfwayBreaksTheConnection) {
  std::string data(kMoreThanSocketsHold, 'x'), received(kMoreThanSocketsHold, ' ');
  {
    auto sent = send(0, data, 1);
    expect_error<TimeoutError>([&] { ranks_[0]->finish(sent, in(20ms)); }, "rank 1");
  }
  auto into = receive(1, received, 1);
  expect_error<PeerError>([&] { ranks_[1]->finish(into, in(10s)); }, "the connection to rank 0 is broken");
}

TEST_F(SocketExchangeTest, AMessageOfAnotherSizeIsAPeerError) {
  std::string data(10, 'x'), received(11, ' ');
  auto sent = send(0, data, 1);
  auto into = receive(1, received, 1);
  expect_error<PeerError>([&] { ranks_[1]->finish(into, in(10s)); }, "10 bytes", "11");
}

}  // namespace
}  // namespace lockstep::gloo_backend
