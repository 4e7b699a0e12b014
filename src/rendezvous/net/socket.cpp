#include "rendezvous/net/socket.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <thread>

#include <lockstep/error.h>

#include "base/log.h"
#include "base/text.h"
#include "base/wait_notice.h"
#include "rendezvous/net/port_owner.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// The kernel retransmits SYN packets with growing intervals, so a new attempt reaches a booting host sooner.
constexpr milliseconds kAttempt(3000);

[[noreturn]] void fail_socket(const std::string& call, int error) {
  throw SystemError(text(call, ": ", std::strerror(error)));
}

void enable(const FileDescriptor& socket, int level, int option) {
  const int on = 1;
  if (::setsockopt(socket.get(), level, option, &on, sizeof on) != 0) fail_socket("setsockopt of a socket", errno);
}

/// Returns a socket that is not open, with errno set, if the system does not support the address family.
FileDescriptor open_socket(const std::string& place, int family) {
  FileDescriptor socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket.is_open()) {
    enable(socket, IPPROTO_TCP, TCP_NODELAY);  // inherited by accepted sockets
  } else if (errno != EAFNOSUPPORT) {
    fail_socket(text("socket for ", place), errno);
  }
  return socket;
}

[[noreturn]] void refuse_port_in_use(const Endpoint& endpoint, const Address& address) {
  std::string owner = port_owner(address);
  if (owner.empty())
    owner = text("a process that cannot be seen from here (find it as root: ss -ltnp 'sport = :", endpoint.port, "')");
  throw SystemError(text("listen at ", to_string(endpoint), ": the port is in use by ", owner,
                         "; end that process or choose another MASTER_PORT, the same on all ranks"));
}

[[noreturn]] void refuse_to_listen(const Endpoint& endpoint, const std::string& reason, int error, const char* remedy) {
  if (!remedy) {
    remedy = "MASTER_ADDR must be a name or an address of the host that listens";
    if (error == EACCES) remedy = "ports below 1024 are reserved: choose another MASTER_PORT";
    if (error == EADDRNOTAVAIL)
      remedy = "this host has no such address: start rank 0 on the host that MASTER_ADDR names";
  }
  throw SystemError(text("listen at ", to_string(endpoint), ": ", reason, "; ", remedy));
}

Address own_address(const FileDescriptor& socket) {
  Address address;
  if (::getsockname(socket.get(), address.get(), &address.bytes) != 0) fail_socket("getsockname of a socket", errno);
  return address;
}

/// TCP self-connect: the system may choose the destination port as the local port, and the socket then connects to
/// itself.
bool is_its_own_peer(const FileDescriptor& socket, const Address& peer) {
  const Address own = own_address(socket);
  return own.port() == peer.port() && own.host() == peer.host();
}

/// Returns 0 if the connection is established, else the errno.
int finish_connecting(const FileDescriptor& socket, const Address& address, Clock::time_point deadline,
                      const OnWait& on_wait) {
  for (;;) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    pollfd waiting{socket.get(), POLLOUT, 0};
    const int ready = ::poll(&waiting, 1, static_cast<int>(std::clamp(left, milliseconds(0), kBetweenCalls).count()));
    if (ready > 0) return connection_error(socket, address);
    if (ready < 0 && errno != EINTR) fail_socket("poll of a socket", errno);
    if (Clock::now() >= deadline) return ETIMEDOUT;
    if (on_wait) on_wait();
  }
}

/// Returns whether the error can disappear once the peer has started. Other errors are local.
bool may_pass(int error) {
  for (int passing : {ECONNREFUSED, ECONNRESET, ECONNABORTED, ETIMEDOUT, EHOSTUNREACH, EHOSTDOWN, ENETUNREACH, ENETDOWN,
                      EADDRNOTAVAIL, EAFNOSUPPORT})
    if (error == passing) return true;
  return false;
}

/// Tries every address once. Returns a socket that is not open, and updates `reason`, if none can be reached.
FileDescriptor connect_to_any(const Endpoint& endpoint, Clock::time_point deadline, const OnWait& on_wait,
                              std::string& reason) {
  const auto resolution = resolve(endpoint.host, endpoint.port);
  if (resolution.addresses.empty()) reason = resolution.failure;
  for (const auto& address : resolution.addresses) {
    int error = 0;
    auto socket = begin_connecting(address, error);
    if (error == EINPROGRESS)
      error = finish_connecting(socket, address, std::min(deadline, Clock::now() + kAttempt), on_wait);
    if (error == 0) return socket;
    if (!may_pass(error)) fail_socket(text("connect to ", to_string(endpoint)), error);
    // If the deadline cut this attempt short, the reason of the previous attempt is more useful.
    if (reason.empty() || Clock::now() < deadline) reason = std::strerror(error);
  }
  return {};
}

}  // namespace

Endpoint parse_endpoint(const std::string& written) {
  const auto colon = written.rfind(':');
  if (colon != written.npos) {
    std::string host = written.substr(0, colon);
    const auto port = parse_number<int>(written.substr(colon + 1));
    const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
    if (bracketed) host = host.substr(1, host.size() - 2);
    const bool named = !host.empty() && host.find_first_of("[]:/@?# \t\r\n") == host.npos;
    if ((bracketed ? is_ipv6(host) : named) && port && *port >= 1 && *port <= 65535) return {host, *port};
  }
  throw UsageError(text("\"", written, "\" is not a socket address: it must be host:port with a port from 1 to ",
                        "65535, like node1:29500, 192.0.2.1:29500 or [2001:db8::1]:29500"));
}

std::string to_string(const Endpoint& endpoint) {
  const bool bare = is_ipv6(endpoint.host);
  return text(bare ? "[" : "", endpoint.host, bare ? "]:" : ":", endpoint.port);
}

bool is_loopback(const std::string& host) {
  const auto addresses = resolve(host, 0).addresses;
  return !addresses.empty() && std::all_of(addresses.begin(), addresses.end(), std::mem_fn(&Address::is_loopback));
}

FileDescriptor listen_at(const Endpoint& endpoint, const char* remedy) {
  const auto resolution = resolve(endpoint.host, endpoint.port);
  int error = 0;
  for (const auto& address : resolution.addresses) {
    auto socket = open_socket(to_string(endpoint), address.family());
    if (socket.is_open()) {
      enable(socket, SOL_SOCKET, SO_REUSEADDR);  // so that a restart can bind the port immediately
      if (address.family() == AF_INET6) enable(socket, IPPROTO_IPV6, IPV6_V6ONLY);
      if (::bind(socket.get(), address.get(), address.bytes) == 0 && ::listen(socket.get(), SOMAXCONN) == 0)
        return socket;
    }
    error = errno;
    // Do not try the next address: clients that use this name would reach the other process.
    if (error == EADDRINUSE) refuse_port_in_use(endpoint, address);
  }
  refuse_to_listen(endpoint, resolution.addresses.empty() ? resolution.failure : std::strerror(error), error, remedy);
}

int port_of(const FileDescriptor& socket) {
  return own_address(socket).port();
}

FileDescriptor connect_to(const Endpoint& endpoint, Clock::time_point deadline, const OnWait& on_wait) {
  const auto start = Clock::now();
  std::string reason;
  WaitNotice notice(start);
  for (auto pause = kFirstPause;; pause = std::min(pause * 2, kMaxPause)) {
    auto socket = connect_to_any(endpoint, deadline, on_wait, reason);
    if (socket.is_open()) return socket;
    const auto now = Clock::now();
    if (now >= deadline) {
      const auto waited = std::chrono::duration_cast<milliseconds>(now - start);
      throw TimeoutError(text(
          "could not connect to ", to_string(endpoint), " within ", waited.count(), " ms: ", reason,
          "; check that rank 0 or the launcher is running, and that MASTER_ADDR and MASTER_PORT name its host and a "
          "port that this host can reach"));
    }
    if (on_wait) on_wait();
    if (!on_wait && notice.is_due(now))
      log_warning(text("has waited for ", notice.seconds(now), " s for rank 0 or the launcher to listen at ",
                       to_string(endpoint), ": ", reason));
    std::this_thread::sleep_until(std::min(now + pause, deadline));
  }
}

FileDescriptor begin_connecting(const Address& address, int& error) {
  auto socket = open_socket(to_string(Endpoint{address.host(), address.port()}), address.family());
  if (!socket.is_open()) {
    error = EAFNOSUPPORT;
    return socket;
  }
  error = ::connect(socket.get(), address.get(), address.bytes) == 0 ? 0 : errno;
  if (error == EINTR) error = EINPROGRESS;  // connecting continues in the background
  if (error == 0) error = connection_error(socket, address);
  return socket;
}

int connection_error(const FileDescriptor& socket, const Address& address) {
  int error = 0;
  socklen_t bytes = sizeof error;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &bytes) != 0)
    fail_socket("getsockopt of a socket", errno);
  return error == 0 && is_its_own_peer(socket, address) ? ECONNREFUSED : error;
}

std::string local_address(const FileDescriptor& socket) {
  return own_address(socket).host();
}

std::string peer_of(const FileDescriptor& socket) {
  Address address;
  // Used in messages about broken connections, so it must not fail.
  if (::getpeername(socket.get(), address.get(), &address.bytes) != 0) return "a disconnected peer";
  return to_string(Endpoint{address.host(), address.port()});
}

}  // namespace lockstep
