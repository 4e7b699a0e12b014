#pragma once

#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include <lockstep/backend.h>

#include "backends/gloo/transport.h"
#include "backends/messages/link.h"

namespace lockstep::gloo_backend {

using messages::Buffer;
using messages::Direction;

/// Bytes under way to or from one peer.
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

/// The TCP connections of one rank to all others of a group. Thread-safe.
class Connection {
 public:
  /// Collective: connects every rank with every other.
  explicit Connection(const BackendContext& context);

  /// Starts the transfer; messages of one slot between two ranks arrive in order.
  Request start(Direction direction, const Buffer& buffer, uint64_t slot);

  /// Returns when the request is done; throws PeerError, TimeoutError or what abort was given.
  void finish(Request& request, Deadline deadline);

  void abort(std::exception_ptr cause) noexcept;

 private:
  void connect(const BackendContext& context);
  void throw_if_aborted();
  bool wait(Request& request, std::chrono::milliseconds limit);

  const int rank_;
  const int size_;
  std::unique_ptr<Transport> transport_;  // constant after construction; none for a single rank
  std::mutex mutex_;
  std::exception_ptr cause_;          // guarded by mutex_
  std::vector<Request*> waited_for_;  // guarded by mutex_: what threads wait for now
};

}  // namespace lockstep::gloo_backend
