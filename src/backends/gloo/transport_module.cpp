// The only file that calls Gloo; transport.h explains why it is a separate module.
//
// Gloo creates its own connections. It accepts the first incoming connection from anyone, and it ends the process when
// it reads unexpected bytes. So Gloo must not listen where others can connect. Instead, authenticated ranks connect
// sockets themselves (rendezvous/net/peer_connector.h), and each socket replaces one of Gloo's own:
//
// 1. A Gloo pair listens at 127.255.255.255, the broadcast address of loopback. Linux allows a socket to listen there,
//    but no client can connect to it.
// 2. The pair gets the address of a socket of this module on loopback to connect to. That address is lower than the
//    pair's own, so the pair closes its listening socket and connects.
// 3. The descriptor of the connected socket is removed from Gloo's event loop, replaced by a duplicate of the rank's
//    socket (dup3), and added again. From then on Gloo reads, writes and closes the descriptor as its own.

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <gloo/common/error.h>
#include <gloo/context.h>
#include <gloo/transport/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/tcp/address.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include "backends/gloo/transport.h"
#include "backends/messages/link.h"
#include "base/file_descriptor.h"

namespace lockstep::gloo_backend {
namespace {

using messages::Direction;
namespace tcp = ::gloo::transport::tcp;

constexpr const char* kUnreachableAddress = "127.255.255.255";
constexpr std::chrono::seconds kLocalConnect(10);  // connecting to a socket of this process

[[noreturn]] void fail(const char* call) {
  throw TransportError(std::string(call) + ": " + std::strerror(errno));
}

/// The address of a peer as Gloo knows it, on loopback, and the real address. correct() fixes Gloo's error messages.
struct PeerName {
  std::string of_gloo{};
  std::string real{};

  std::string correct(std::string message) const {
    const auto at = of_gloo.empty() ? message.npos : message.find(of_gloo);
    return at == message.npos ? message : message.replace(at, of_gloo.size(), real);
  }
};

template <class Call>
auto translate_errors(const PeerName& peer, const Call& call) {
  try {
    return call();
  } catch (const ::gloo::Exception& error) {
    throw TransportError(peer.correct(error.what()));
  }
}

class GlooRequest final : public TransportRequest {
 public:
  GlooRequest(std::unique_ptr<::gloo::transport::UnboundBuffer> buffer, Direction direction, const PeerName& peer)
      : buffer_(std::move(buffer)), direction_(direction), peer_(peer) {}

  bool wait(std::chrono::milliseconds limit) override {
    return translate_errors(
        peer_, [&] { return direction_ == Direction::kSend ? buffer_->waitSend(limit) : buffer_->waitRecv(limit); });
  }

  void interrupt() override { direction_ == Direction::kSend ? buffer_->abortWaitSend() : buffer_->abortWaitRecv(); }

 private:
  const std::unique_ptr<::gloo::transport::UnboundBuffer> buffer_;
  const Direction direction_;
  const PeerName& peer_;  // owned by the transport
};

/// Listens on loopback for a Gloo pair to connect to. Never accepts: the destructor closes pending connections.
class LocalTarget {
 public:
  LocalTarget() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    address_.sin_family = AF_INET;
    address_.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof address_;
    auto* address = reinterpret_cast<sockaddr*>(&address_);
    if (!socket_.is_open() || ::bind(socket_.get(), address, bytes) != 0 || ::listen(socket_.get(), SOMAXCONN) != 0 ||
        ::getsockname(socket_.get(), address, &bytes) != 0)
      fail("listening on 127.0.0.1");
  }

  tcp::Address address() const { return tcp::Address(reinterpret_cast<const sockaddr*>(&address_), sizeof address_); }

  /// Whether the descriptor is connected to this socket.
  bool is_peer_of(int descriptor) const {
    sockaddr_in peer{};
    socklen_t bytes = sizeof peer;
    return ::getpeername(descriptor, reinterpret_cast<sockaddr*>(&peer), &bytes) == 0 && peer.sin_family == AF_INET &&
           peer.sin_addr.s_addr == address_.sin_addr.s_addr && peer.sin_port == address_.sin_port;
  }

 private:
  const FileDescriptor socket_;
  sockaddr_in address_{};
};

/// Returns the descriptor of this process that is connected to the target.
int find_descriptor(const LocalTarget& target) {
  const std::unique_ptr<DIR, int (*)(DIR*)> open(::opendir("/proc/self/fd"), &::closedir);
  if (!open) fail("/proc/self/fd");
  while (const dirent* entry = ::readdir(open.get()))
    if (const int descriptor = std::atoi(entry->d_name); entry->d_name[0] != '.' && target.is_peer_of(descriptor))
      return descriptor;
  throw TransportError("Gloo has not connected to the local listening socket");
}

/// Keeps Gloo's event loop spinning during its lifetime. Removing a descriptor waits for the next iteration of the
/// loop, which otherwise takes up to 10 ms: one second for 100 ranks.
class QuickLoop final : private tcp::Handler {
 public:
  explicit QuickLoop(tcp::Device& device) : device_(device), readable_(::eventfd(1, EFD_CLOEXEC)) {
    if (!readable_.is_open()) fail("eventfd");
    device_.registerDescriptor(readable_.get(), EPOLLIN, this);
  }
  ~QuickLoop() override { device_.unregisterDescriptor(readable_.get(), this); }

 private:
  void handleEvents(int) override {}

  tcp::Device& device_;
  const FileDescriptor readable_;
};

class GlooTransport final : public Transport, private ::gloo::Context {
 public:
  GlooTransport(int rank, int size) : ::gloo::Context(rank, size), peers_(size) {
    device_ = tcp::CreateDevice(kUnreachableAddress);
    transportContext_ = device_->createContext(rank, size);
    transportContext_->setTimeout(kLocalConnect);
  }

  void adopt(const std::vector<PeerSocket>& sockets) override {
    const QuickLoop quick(tcp_device());
    for (const auto& socket : sockets) {
      try {
        adopt(socket);
      } catch (const std::exception& error) {
        throw TransportError("connection to rank " + std::to_string(socket.peer) + ": " + error.what());
      }
    }
  }

  std::unique_ptr<TransportRequest> send(int peer, const void* data, size_t bytes, uint64_t slot) override {
    return translate_errors(peers_[peer], [&] {
      auto buffer = createUnboundBuffer(const_cast<void*>(data), bytes);  // Gloo has one class for both directions
      buffer->send(peer, slot);
      return std::make_unique<GlooRequest>(std::move(buffer), Direction::kSend, peers_[peer]);
    });
  }

  std::unique_ptr<TransportRequest> recv(int peer, void* data, size_t bytes, uint64_t slot) override {
    return translate_errors(peers_[peer], [&] {
      auto buffer = createUnboundBuffer(data, bytes);
      buffer->recv(peer, slot);
      return std::make_unique<GlooRequest>(std::move(buffer), Direction::kRecv, peers_[peer]);
    });
  }

 private:
  tcp::Device& tcp_device() const { return dynamic_cast<tcp::Device&>(*device_); }

  void adopt(const PeerSocket& socket) {
    const LocalTarget target;
    auto& pair = transportContext_->createPair(socket.peer);
    pair->connect(target.address().bytes());
    const int descriptor = find_descriptor(target);
    auto* handler = &dynamic_cast<tcp::Handler&>(*pair);
    tcp_device().unregisterDescriptor(descriptor, handler);
    if (::dup3(socket.descriptor, descriptor, O_CLOEXEC) < 0) fail("dup3");
    tcp_device().registerDescriptor(descriptor, EPOLLIN, handler);
    peers_[socket.peer] = {target.address().str(), socket.address};
  }

  std::vector<PeerName> peers_;  // by rank; constant after all sockets are adopted
};

}  // namespace

extern "C" __attribute__((visibility("default"))) Transport* lockstep_open_gloo(int rank, int size) {
  return new GlooTransport(rank, size);
}

}  // namespace lockstep::gloo_backend
