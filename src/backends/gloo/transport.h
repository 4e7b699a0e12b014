#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

/// The part of Gloo that lockstep uses, in types of the standard library only.
///
/// PyTorch's wheel contains its own Gloo and exports the symbols. Code compiled with the headers of the installed Gloo
/// would bind to the classes of the wheel, whose layout differs, and crash. So only a separate module calls Gloo
/// (transport_module.cpp, built as liblockstep_gloo). `open_transport` loads the module when the first group needs it
/// and binds it to the installed Gloo.
namespace lockstep::gloo_backend {

/// An error from Gloo: a connection is broken, or a wait timed out.
class TransportError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A message in transit to or from one peer.
class TransportRequest {
 public:
  virtual ~TransportRequest() = default;
  /// Blocks until the message is done. Returns false when interrupted. Throws TransportError after the limit; a
  /// time-out breaks all connections of the transport.
  virtual bool wait(std::chrono::milliseconds limit) = 0;
  /// Interrupts the current wait, or else the next one.
  virtual void interrupt() = 0;
};

/// A nonblocking TCP socket that is connected to another rank.
struct PeerSocket {
  int peer = 0;
  int descriptor = -1;
  std::string address{};  // of the peer, for error messages
};

/// The TCP connections of one rank to all other ranks of a group.
class Transport {
 public:
  virtual ~Transport() = default;

  /// Uses duplicates of the sockets for all messages between this rank and the peers; the caller keeps ownership of the
  /// originals. Call it once. Throws TransportError.
  virtual void adopt(const std::vector<PeerSocket>& sockets) = 0;

  /// Start a message. Messages of one slot between two ranks arrive in order. The data must outlive the request. Both
  /// throw TransportError.
  virtual std::unique_ptr<TransportRequest> send(int peer, const void* data, size_t bytes, uint64_t slot) = 0;
  virtual std::unique_ptr<TransportRequest> recv(int peer, void* data, size_t bytes, uint64_t slot) = 0;
};

/// Throws SystemError when the module cannot be loaded.
std::unique_ptr<Transport> open_transport(int rank, int size);

}  // namespace lockstep::gloo_backend
