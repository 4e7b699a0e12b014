#pragma once

#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include <lockstep/backend.h>

#include "backends/gloo/socket_exchange.h"
#include "backends/gloo/transport.h"
#include "backends/messages/link.h"

namespace lockstep::gloo_backend {

/// A message in transit to or from one peer, carried by Gloo.
class Request {
 public:
  Request(Transport& transport, Direction direction, const Buffer& buffer, uint64_t slot);

  int peer() const { return peer_; }
  bool is_send() const { return direction_ == Direction::kSend; }

  bool wait(std::chrono::milliseconds limit) { return request_->wait(limit); }
  void interrupt() { request_->interrupt(); }

 private:
  int peer_;
  Direction direction_;
  std::unique_ptr<TransportRequest> request_;
};

/// The TCP connections of one rank to all other ranks of a group: one socket per peer for Gloo, and one for a
/// SocketExchange. Thread-safe, except for the exchange.
class Connection {
 public:
  /// Collective: connects every rank to every other rank.
  explicit Connection(const BackendContext& context);

  /// Starts a message. Messages of one slot between two ranks arrive in order. Throws PeerError when the connection is
  /// broken.
  Request start(Direction direction, const Buffer& buffer, uint64_t slot);

  /// Blocks until the request is done. Throws PeerError, TimeoutError, or the cause given to abort.
  void finish(Request& request, Deadline deadline);

  /// The messages that the calling thread moves itself. Requires more than one rank.
  SocketExchange& exchange() { return *exchange_; }

  void abort(std::exception_ptr cause) noexcept;

 private:
  std::vector<FileDescriptor> connect(const BackendContext& context, const char* purpose);
  void open_gloo(const std::vector<FileDescriptor>& sockets);
  void throw_if_aborted();
  bool wait(Request& request, std::chrono::milliseconds limit);

  const int rank_;
  const int size_;
  std::unique_ptr<Transport> transport_;      // constant after construction; null for a single rank
  std::unique_ptr<SocketExchange> exchange_;  // constant after construction; null for a single rank
  std::mutex mutex_;
  std::exception_ptr cause_;          // guarded by mutex_
  std::vector<Request*> waited_for_;  // guarded by mutex_: requests that threads are waiting for
};

}  // namespace lockstep::gloo_backend
