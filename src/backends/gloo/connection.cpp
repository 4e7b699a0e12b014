#include "backends/gloo/connection.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>

#include <lockstep/error.h>

#include "base/text.h"
#include "rendezvous/net/peer_connector.h"

namespace lockstep::gloo_backend {
namespace {

constexpr std::chrono::hours kForever(24 * 365);  // not milliseconds::max(), because Gloo converts to nanoseconds
constexpr auto kAbortWait = std::chrono::milliseconds(1);
constexpr uint64_t kAbortSlot = ~uint64_t{0};

constexpr const char* kRemedy = "set LOCKSTEP_INTERFACE to an interface of this host that all other ranks can reach";

// Chooses the address to listen on. Ranks on one host use loopback, which other hosts cannot observe. Ranks on several
// hosts use LOCKSTEP_INTERFACE, else the address from which this host reaches the job's store, else the host name.
std::string choose_host(const BackendContext& context) {
  if (const char* interface = std::getenv("LOCKSTEP_INTERFACE"); interface && *interface) {
    auto address = address_of_interface(interface);
    if (!address.empty()) return address;
    throw SystemError(text("gloo cannot listen on interface ", interface,
                           ": this host has no such interface, or the interface has no address; ", kRemedy));
  }
  if (context.one_host) return loopback_address();
  if (!context.address.empty()) return context.address;
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  return name;
}

// Gloo writes to sockets without MSG_NOSIGNAL. A write to a closed connection would raise SIGPIPE and end this process
// without a message. A program that has its own handler keeps it.
void ignore_broken_pipes() {
  struct sigaction current {};
  if (::sigaction(SIGPIPE, nullptr, &current) == 0 && current.sa_handler == SIG_DFL) ::signal(SIGPIPE, SIG_IGN);
}

}  // namespace

Request::Request(Transport& transport, Direction direction, const Buffer& buffer, uint64_t slot)
    : peer_(buffer.peer),
      direction_(direction),
      request_(direction == Direction::kSend ? transport.send(buffer.peer, buffer.data, buffer.bytes, slot)
                                             : transport.recv(buffer.peer, buffer.data, buffer.bytes, slot)) {}

Connection::Connection(const BackendContext& context) : rank_(context.rank), size_(context.size) {
  if (size_ == 1) return;
  ignore_broken_pipes();
  open_gloo(connect(context, "gloo/"));
  exchange_ = std::make_unique<SocketExchange>(connect(context, "exchange/"));
}

/// Connects the ranks and returns the sockets by rank. Throws the cause when the job fails meanwhile.
std::vector<FileDescriptor> Connection::connect(const BackendContext& context, const char* purpose) {
  PeerConnector connector({.rank = rank_,
                           .size = size_,
                           .host = choose_host(context),
                           .store = with_prefix(context.store, purpose),
                           .timeout = context.timeout,
                           .remedy = kRemedy});
  auto alarm = context.on_failure
                   ? context.on_failure([&](std::exception_ptr cause) { connector.give_up(std::move(cause)); })
                   : nullptr;
  return connector.connect();
}

void Connection::open_gloo(const std::vector<FileDescriptor>& sockets) {
  std::vector<PeerSocket> peers;
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_) peers.push_back({peer, sockets[peer].get(), peer_of(sockets[peer])});
  try {
    transport_ = open_transport(rank_, size_);
    transport_->adopt(peers);
  } catch (const SystemError&) {
    throw;
  } catch (const std::system_error& error) {  // the thread of Gloo's event loop
    throw SystemError(text("Gloo cannot start a thread: ", error.what(),
                           "; raise the limit of threads (ulimit -u, or the cgroup's pids.max) or free memory"));
  } catch (const std::exception& error) {
    throw SystemError(
        text("Gloo cannot take over the connections: ", error.what(),
             "; Gloo needs /proc and IPv4 on the loopback interface, also if the network is IPv6 only: ip "
             "link set lo up; ip address add 127.0.0.1/8 dev lo. Or use the backend shm on one host"));
  }
}

void Connection::throw_if_aborted() {
  std::lock_guard lock(mutex_);
  if (cause_) std::rethrow_exception(cause_);
}

Request Connection::start(Direction direction, const Buffer& buffer, uint64_t slot) {
  throw_if_aborted();
  try {
    return Request(*transport_, direction, buffer, slot);
  } catch (const TransportError& error) {
    throw PeerError(text("the connection to rank ", buffer.peer, " is broken: ", error.what()));
  }
}

bool Connection::wait(Request& request, std::chrono::milliseconds limit) {
  {
    std::lock_guard lock(mutex_);
    if (cause_) std::rethrow_exception(cause_);
    waited_for_.push_back(&request);
  }
  struct Release {
    Connection& connection;
    Request* request;
    ~Release() {
      std::lock_guard lock(connection.mutex_);
      std::erase(connection.waited_for_, request);
    }
  } release{*this, &request};
  return request.wait(limit);
}

void Connection::finish(Request& request, Deadline deadline) {
  auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  auto limit = std::clamp<std::chrono::milliseconds>(left, std::chrono::milliseconds(1), kForever);
  try {
    if (wait(request, limit)) return;
    throw_if_aborted();
    throw PeerError(text("the message to or from rank ", request.peer(), " was canceled on this rank"));
  } catch (const TransportError& error) {
    throw_if_aborted();
    if (std::chrono::steady_clock::now() >= deadline)
      throw TimeoutError(text("timed out: rank ", request.peer(),
                              request.is_send() ? " did not receive" : " did not send", " the data of this call"));
    throw PeerError(text("the connection to rank ", request.peer(), " is broken: ", error.what()));
  }
}

void Connection::abort(std::exception_ptr cause) noexcept {
  {
    std::lock_guard lock(mutex_);
    if (cause_) return;
    cause_ = cause;
    for (Request* request : waited_for_) request->interrupt();
  }
  if (!transport_) return;
  exchange_->abort(cause);
  // Closes all connections, so that the other ranks notice. Gloo closes its connections when a wait on any of them
  // times out. A receive on an already broken connection fails at once, without a wait, so this tries every peer.
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    try {
      char nothing = 0;
      transport_->recv(peer, &nothing, 1, kAbortSlot)->wait(kAbortWait);
    } catch (const std::exception&) {
      // expected: the receive timed out, or the connection was already broken
    }
  }
}

}  // namespace lockstep::gloo_backend
