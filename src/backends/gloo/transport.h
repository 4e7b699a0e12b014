#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

/// What lockstep uses of Gloo, in types of the standard library alone.
///
/// PyTorch's wheel contains a Gloo of its own and exports its symbols. Code that is compiled with the headers of the
/// installed Gloo would be bound to the wheel's classes, whose layout differs, and crash. So only a module calls Gloo
/// (transport_module.cpp, built as liblockstep_gloo). `open_transport` loads the module when the first group needs it
/// and binds it to the installed Gloo.
namespace lockstep::gloo_backend {

/// Gloo's own error: a connection is broken, or a wait took too long.
class TransportError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Bytes under way to or from one peer.
class TransportRequest {
 public:
  virtual ~TransportRequest() = default;
  /// False when interrupted. Throws TransportError after the limit; all connections of the transport are broken then.
  virtual bool wait(std::chrono::milliseconds limit) = 0;
  /// Ends the wait that is under way, or else the next.
  virtual void interrupt() = 0;
};

/// A nonblocking TCP socket that is connected to another rank.
struct PeerSocket {
  int peer = 0;
  int descriptor = -1;
  std::string address{};  // of the peer, for error messages
};

/// The TCP connections of one rank to all others of a group.
class Transport {
 public:
  virtual ~Transport() = default;

  /// Uses duplicates of the sockets for all messages between this rank and the peers. To be called once. Throws
  /// TransportError.
  virtual void adopt(const std::vector<PeerSocket>& sockets) = 0;

  /// Messages of one slot between two ranks arrive in order. Both throw TransportError.
  virtual std::unique_ptr<TransportRequest> send(int peer, const void* data, size_t bytes, uint64_t slot) = 0;
  virtual std::unique_ptr<TransportRequest> recv(int peer, void* data, size_t bytes, uint64_t slot) = 0;
};

/// Throws SystemError if the module cannot be loaded.
std::unique_ptr<Transport> open_transport(int rank, int size);

}  // namespace lockstep::gloo_backend
