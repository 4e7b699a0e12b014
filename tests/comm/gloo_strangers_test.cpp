// Other users of the machine, who find the ports of a job's ranks and connect there first.

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/failing_job.h"
#include "support/eventually.h"
#include "support/listening_sockets.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

/// A message of Gloo's: its size, "this is for an unbound buffer", and a slot that nobody receives at.
std::string gloo_message() {
  const std::array<size_t, 6> preamble{48 + 8, 1, 12345, 0, 8, 0};
  return {reinterpret_cast<const char*>(preamble.data()), sizeof preamble};
}

/// Connections to a rank's ports by somebody who knows nothing of the job.
class Intruder {
 public:
  ~Intruder() {
    for (int socket : sockets_) ::close(socket);
  }

  void connect(int port) {
    const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    if (::connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {  // too late
      ::close(socket);
      return;
    }
    const auto words = std::array<std::string, 4>{"", "GET / HTTP/1.0\r\n\r\n", gloo_message(),
                                                  std::string(500, 'x')}[connected_++ % 4];
    [[maybe_unused]] auto sent = ::send(socket, words.data(), words.size(), MSG_NOSIGNAL);
    sockets_.push_back(socket);
    if (sockets_.size() <= 300) return;
    ::close(sockets_.front());
    sockets_.erase(sockets_.begin());
  }

  int connected() const { return connected_; }

 private:
  std::vector<int> sockets_;
  int connected_ = 0;
};

class GlooStrangers : public FailingJob {
 protected:
  /// Three ranks, of which rank 1 stops between listening and connecting, and the others wait for it.
  JobProcesses stopped_job() {
    auto ranks = job("stops_while_connecting", 3, {{"TEST_BACKEND", "slow"}});
    ranks.start_all();
    ranks[1].expect_line("published");
    return ranks;
  }

  /// Without the store's.
  static std::set<int> ports_for_tensors(JobProcesses& ranks, int rank) {
    auto ports = listening_ports(ranks[rank].pid());
    ports.erase(ranks.port());
    return ports;
  }
};

TEST_F(GlooStrangers, WhoConnectFirstDoNotStopTheJob) {
  auto ranks = stopped_job();
  Intruder intruder;
  for (int rank = 0; rank < 3; ++rank) {
    std::set<int> ports;
    ASSERT_TRUE(eventually([&] { return !(ports = ports_for_tensors(ranks, rank)).empty(); }));
    for (int port : ports)
      for (int i = 0; i < 4; ++i) intruder.connect(port);
  }
  ASSERT_GE(intruder.connected(), 12);
  ranks[1].say("go on");
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(ranks[rank].wait(), 0) << ranks[rank].output();
}

TEST_F(GlooStrangers, WhoNeverStopConnectingDoNotStopTheJob) {
  auto ranks = stopped_job();
  std::atomic<bool> is_over{false};
  std::atomic<int> connected{0};
  std::thread flood([&] {
    Intruder intruder;
    while (!is_over) {
      for (int rank = 0; rank < 3; ++rank)
        for (int port : ports_for_tensors(ranks, rank)) intruder.connect(port);
      connected = intruder.connected();
    }
  });
  EXPECT_TRUE(eventually([&] { return connected > 200; }));
  ranks[1].say("go on");
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(ranks[rank].wait(), 0) << ranks[rank].output();
  is_over = true;
  flood.join();
}

TEST_F(GlooStrangers, FindNoPortOnceTheRanksAreConnected) {
  auto ranks = job("counts", 3, {{"TEST_BACKEND", "gloo"}});
  ranks.start_all();
  for (int rank = 0; rank < 3; ++rank) ranks[rank].expect_line("running");
  for (int rank = 0; rank < 3; ++rank) EXPECT_THAT(ports_for_tensors(ranks, rank), testing::IsEmpty());
  ranks[0].say("enough");
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(ranks[rank].wait(), 0) << ranks[rank].output();
}

}  // namespace
}  // namespace lockstep
