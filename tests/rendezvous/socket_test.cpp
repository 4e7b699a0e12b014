#include "rendezvous/net/socket.h"

#include <fcntl.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <future>
#include <sstream>
#include <thread>
#include <vector>

#include <lockstep/error.h>

#include "support/messages.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

Clock::time_point in(std::chrono::milliseconds time) {
  return Clock::now() + time;
}

bool is_readable(const FileDescriptor& file) {
  pollfd waiting{file.get(), POLLIN, 0};
  return ::poll(&waiting, 1, 10000) == 1;
}

FileDescriptor accept_from(const FileDescriptor& listener) {
  if (!is_readable(listener)) return {};
  return FileDescriptor(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
}

int option_of(const FileDescriptor& socket, int level, int option) {
  int value = 0;
  socklen_t bytes = sizeof value;
  EXPECT_EQ(::getsockopt(socket.get(), level, option, &value, &bytes), 0);
  return value;
}

/// A port of 127.0.0.1 on which nobody listens and which nobody else gets while the object lives.
class SilentPort {
 public:
  SilentPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int on = 1;
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::bind(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  }

  Endpoint endpoint() const { return {"127.0.0.1", port_of(socket_)}; }
  void listen(int places = 8) { EXPECT_EQ(::listen(socket_.get(), places), 0); }
  const FileDescriptor& socket() const { return socket_; }

 private:
  FileDescriptor socket_;
};

/// How many connections were refused on this host.
int64_t refused_connections() {
  std::ifstream table("/proc/net/snmp");
  std::vector<std::string> names, values;
  for (std::string line; std::getline(table, line);) {
    if (!line.starts_with("Tcp:")) continue;
    std::istringstream words(line);
    auto& list = names.empty() ? names : values;
    for (std::string word; words >> word;) list.push_back(word);
  }
  for (size_t i = 0; i < values.size(); ++i)
    if (names[i] == "AttemptFails") return std::stoll(values[i]);
  return -1;
}

bool has_ipv6_loopback() {
  try {
    listen_at({"::1", 0});
    return true;
  } catch (const SystemError&) {
    return false;
  }
}

TEST(FileDescriptor, ClosesWithTheObjectThatHasItLast) {
  FileDescriptor closed;
  EXPECT_FALSE(closed.is_open());
  int number = -1;
  {
    FileDescriptor first(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    number = first.get();
    FileDescriptor second(std::move(first));
    EXPECT_FALSE(first.is_open());
    FileDescriptor third(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    const int replaced = third.get();
    third = std::move(second);
    EXPECT_EQ(third.get(), number);
    EXPECT_EQ(::fcntl(replaced, F_GETFD), -1);
    EXPECT_NE(::fcntl(number, F_GETFD), -1);
  }
  EXPECT_EQ(::fcntl(number, F_GETFD), -1);
}

TEST(Endpoint, IsReadAsItIsWritten) {
  const std::vector<std::pair<std::string, Endpoint>> endpoints{{"node-1.example:29500", {"node-1.example", 29500}},
                                                                {"192.0.2.1:1", {"192.0.2.1", 1}},
                                                                {"[2001:db8::1]:65535", {"2001:db8::1", 65535}},
                                                                {"[fe80::7%eth0]:80", {"fe80::7%eth0", 80}}};
  for (const auto& [written, endpoint] : endpoints) {
    EXPECT_EQ(parse_endpoint(written), endpoint) << written;
    EXPECT_EQ(to_string(endpoint), written);
  }
}

TEST(Endpoint, RefusesWhatIsNotAHostAndAPort) {
  for (const std::string written : {"",           "node",          "node:",         ":29500",      "node:0",
                                    "node:65536", "node:-1",       "node:+1",       "node:1x",     "node: 1",
                                    "a b:1",      "2001:db8::1",   "::1:29500",     "[::1]",       "[::1]29500",
                                    "[]:1",       "[node]:1",      "[192.0.2.1]:1", "[::1:1",      "::1]:1",
                                    "[[::1]]:1",  "http://node:1", "node:1/",       "user@node:1", "10.0.0.1:1:2"})
    expect_error<UsageError>([&] { parse_endpoint(written); }, "\"" + written + "\"", "host:port", "1 to 65535",
                             "[2001:db8::1]:29500");
}

TEST(Loopback, IsWhatNoOtherHostCanReach) {
  for (const char* host : {"127.0.0.1", "127.255.3.4", "::1", "[::1]", "::ffff:127.0.0.1", "localhost"})
    EXPECT_TRUE(is_loopback(host)) << host;
  for (const char* host : {"192.0.2.1", "126.0.0.1", "128.0.0.1", "0.0.0.0", "::", "::2", "2001:db8::1",
                           "[2001:db8::1]", "::ffff:192.0.2.1", "fe80::1", "", "[]", "127.0.0.1x y"})
    EXPECT_FALSE(is_loopback(host)) << host;
}

TEST(Socket, CarriesBytesBothWays) {
  const auto listener = listen_at({"127.0.0.1", 0});
  ASSERT_GT(port_of(listener), 0);
  const auto client = connect_to({"127.0.0.1", port_of(listener)}, in(10s));
  const auto server = accept_from(listener);
  ASSERT_TRUE(server.is_open());
  for (auto [from, to] : {std::pair(&client, &server), std::pair(&server, &client)}) {
    char byte = 0;
    EXPECT_EQ(::send(from->get(), "x", 1, MSG_NOSIGNAL), 1);
    ASSERT_TRUE(is_readable(*to));
    EXPECT_EQ(::recv(to->get(), &byte, 1, 0), 1);
    EXPECT_EQ(byte, 'x');
  }
}

TEST(Socket, WorksOverIpv6) {
  if (!has_ipv6_loopback()) GTEST_SKIP() << "this machine has no ::1";
  for (const std::string host : {"::1", "[::1]"}) {
    const auto listener = listen_at({host, 0});
    const auto client = connect_to({host, port_of(listener)}, in(10s));
    EXPECT_EQ(local_address(client), "::1");
    EXPECT_EQ(peer_of(client), "[::1]:" + std::to_string(port_of(listener)));
  }
}

TEST(Socket, NeverBlocksNorDelaysNorIsInherited) {
  const auto listener = listen_at({"localhost", 0});
  const auto client = connect_to({"localhost", port_of(listener)}, in(10s));
  const auto server = accept_from(listener);
  for (const auto* socket : {&listener, &client}) {
    EXPECT_TRUE(::fcntl(socket->get(), F_GETFL) & O_NONBLOCK);
    EXPECT_TRUE(::fcntl(socket->get(), F_GETFD) & FD_CLOEXEC);
  }
  for (const auto* socket : {&server, &client}) EXPECT_NE(option_of(*socket, IPPROTO_TCP, TCP_NODELAY), 0);
}

TEST(Socket, KnowsBothItsEnds) {
  const auto listener = listen_at({"127.0.0.1", 0});
  auto client = connect_to({"127.0.0.1", port_of(listener)}, in(10s));
  const auto server = accept_from(listener);
  EXPECT_EQ(local_address(client), "127.0.0.1");
  EXPECT_EQ(peer_of(client), "127.0.0.1:" + std::to_string(port_of(listener)));
  EXPECT_EQ(peer_of(server), "127.0.0.1:" + std::to_string(port_of(client)));
  EXPECT_EQ(peer_of(listener), "a disconnected peer");
}

TEST(Listening, IsAtItsAddressOnly) {
  const auto listener = listen_at({"127.0.0.1", 0});
  EXPECT_NO_THROW(listen_at({"127.0.0.99", port_of(listener)}));  // no other test has sockets at this address
}

TEST(Listening, FindsThePortOfAnEndedProcessFreeAtOnce) {
  Endpoint endpoint{"127.0.0.1", 0};
  {
    const auto listener = listen_at(endpoint);
    endpoint.port = port_of(listener);
    const auto client = connect_to(endpoint, in(10s));
    auto server = accept_from(listener);
    server = {};  // who closes first keeps the port busy for a minute
    ASSERT_TRUE(is_readable(client));
  }
  EXPECT_EQ(port_of(listen_at(endpoint)), endpoint.port);
}

TEST(Listening, NamesTheProcessThatHasThePort) {
  const auto first = listen_at({"127.0.0.1", 0});
  const Endpoint endpoint{"127.0.0.1", port_of(first)};
  std::string name;
  std::ifstream comm("/proc/self/comm");
  std::getline(comm, name);
  const auto owner = "in use by pid " + std::to_string(::getpid()) + " (" + name + ")";
  expect_error<SystemError>([&] { listen_at(endpoint); }, to_string(endpoint), owner, "choose another MASTER_PORT");
  expect_error<SystemError>([&] { listen_at({"0.0.0.0", endpoint.port}); }, owner);
}

TEST(Listening, NamesTheProcessThatHasAnIpv6Port) {
  if (!has_ipv6_loopback()) GTEST_SKIP() << "this machine has no ::1";
  const auto first = listen_at({"::1", 0});
  expect_error<SystemError>(
      [&] {
        listen_at({"::1", port_of(first)});
      },
      "[::1]:" + std::to_string(port_of(first)), "in use by pid " + std::to_string(::getpid()) + " (");
}

// A socket that is under way from one process to another is open in none.
TEST(Listening, SaysHowToFindAProcessThatItCannotSee) {
  auto listener = listen_at({"127.0.0.1", 0});
  const int port = port_of(listener);
  int pair[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, pair), 0);
  const FileDescriptor one(pair[0]), two(pair[1]);
  char byte = 'x';
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  const int number = listener.get();
  std::memcpy(CMSG_DATA(header), &number, sizeof number);
  ASSERT_EQ(::sendmsg(one.get(), &message, 0), 1);
  listener = {};
  expect_error<SystemError>(
      [&] {
        listen_at({"127.0.0.1", port});
      },
      "cannot be seen", "as root: ss -ltnp", ":" + std::to_string(port), "choose another MASTER_PORT");
}

TEST(Listening, SaysWhereTheHostOfAnAddressIs) {
  expect_error<SystemError>([] { listen_at({"192.0.2.1", 0}); }, "192.0.2.1:0", "Cannot assign", "MASTER_ADDR");
  expect_error<SystemError>([] { listen_at({std::string(300, 'a'), 1}); }, "aaa:1", "does not resolve", "MASTER_ADDR");
}

TEST(Connecting, WaitsUntilSomebodyListens) {
  SilentPort port;
  const auto refused = refused_connections();
  auto client = std::async(std::launch::async, [&] { return connect_to(port.endpoint(), in(30s)); });
  // Not before the first refusal.
  const auto limit = in(10s);
  while (refused_connections() == refused && Clock::now() < limit) std::this_thread::yield();
  port.listen();
  EXPECT_EQ(peer_of(client.get()), to_string(port.endpoint()));
}

TEST(Connecting, EndsAtTheDeadlineWithTheEndpointAndTheReason) {
  const SilentPort port;
  const auto deadline = in(50ms);
  expect_error<TimeoutError>([&] { connect_to(port.endpoint(), deadline); }, to_string(port.endpoint()), "refused",
                             "MASTER_ADDR and MASTER_PORT");
  EXPECT_GE(Clock::now(), deadline);
}

TEST(Connecting, EndsAfterOneTryWhenTheDeadlineHasPassed) {
  const SilentPort port;
  expect_error<TimeoutError>([&] { connect_to(port.endpoint(), in(-1s)); }, to_string(port.endpoint()), "MASTER_PORT");
}

// The one place in the queue is taken, so the system drops what comes.
TEST(Connecting, EndsAtTheDeadlineWhenNobodyAnswers) {
  SilentPort port;
  port.listen(0);
  const auto queued = connect_to(port.endpoint(), in(10s));
  ASSERT_TRUE(is_readable(port.socket()));
  expect_error<TimeoutError>([&] { connect_to(port.endpoint(), in(50ms)); }, to_string(port.endpoint()), "timed out");
}

TEST(Connecting, KeepsAskingForANameThatDoesNotResolve) {
  const auto deadline = in(50ms);
  expect_error<TimeoutError>(
      [&] {
        connect_to({std::string(300, 'a'), 29500}, deadline);
      },
      "aaa:29500", "the name does not resolve");
  EXPECT_GE(Clock::now(), deadline);
}

TEST(Connecting, FailsAtOnceWithoutFilesLeft) {
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  rlimit none = limit;
  none.rlim_cur = 0;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const auto deadline = in(60s);
  expect_error<SystemError>([&] { connect_to({"127.0.0.1", 1}, deadline); }, "127.0.0.1:1", "Too many open files");
  EXPECT_LT(Clock::now(), deadline);
  EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
}

TEST(Connecting, FailsAtOnceWithAnAddressThatCannotBeConnectedTo) {
  if (!has_ipv6_loopback()) GTEST_SKIP() << "this machine has no IPv6";
  const auto deadline = in(60s);
  expect_error<SystemError>([&] { connect_to({"fe80::1", 1}, deadline); }, "[fe80::1]:1", "Invalid argument");
  EXPECT_LT(Clock::now(), deadline);
}

/// A process in a network of its own that has loopback alone, where connections leave from the ports 40000 and 40001.
class OwnNetwork : public testing::Test {
 protected:
  enum Outcome { kTrue, kFalse, kNoSuchNetwork };

  /// Whether `claim` holds there.
  void expect(const std::function<bool()>& claim) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(!enter() ? kNoSuchNetwork : claim() ? kTrue : kFalse);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status));
    if (WEXITSTATUS(status) == kNoSuchNetwork) GTEST_SKIP() << "this machine allows no network namespaces";
    EXPECT_EQ(WEXITSTATUS(status), kTrue);
  }

 private:
  static bool enter() {
    if (::unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) return false;
    const FileDescriptor socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    ifreq loopback{};
    std::memcpy(loopback.ifr_name, "lo", 3);
    loopback.ifr_flags = IFF_UP | IFF_RUNNING;
    if (::ioctl(socket.get(), SIOCSIFFLAGS, &loopback) != 0) return false;
    return static_cast<bool>(std::ofstream("/proc/sys/net/ipv4/ip_local_port_range") << "40000 40001" << std::flush);
  }
};

// Soon a connection leaves from the very port that it goes to.
TEST_F(OwnNetwork, ConnectingDoesNotTakeItselfForTheListener) {
  expect([] {
    try {
      connect_to({"127.0.0.1", 40000}, in(300ms));
      return false;
    } catch (const TimeoutError&) {
      return true;
    }
  });
}

TEST_F(OwnNetwork, ListeningAtAllIpv6AddressesLeavesIpv4Alone) {
  if (!has_ipv6_loopback()) GTEST_SKIP() << "this machine has no IPv6";
  expect([] { return option_of(listen_at({"::", 0}), IPPROTO_IPV6, IPV6_V6ONLY) != 0; });
}

}  // namespace
}  // namespace lockstep
