#pragma once

#include <poll.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include <lockstep/backend.h>

#include "backends/messages/link.h"
#include "base/file_descriptor.h"

namespace lockstep::gloo_backend {

using messages::Buffer;
using messages::Direction;

/// Messages between this rank and all other ranks, on one TCP socket per peer. The thread that waits for a message
/// reads and writes all sockets itself.
///
/// Gloo has a thread for that. A message then needs two wake-ups on each side, and while the calling thread writes to a
/// socket, Gloo's thread spins if bytes arrive there. With as many ranks as cores that takes most of the time.
///
/// Each message is a frame: slot, number of bytes, data. A receive takes the next frame of its peer if the slots are
/// equal. A frame without a receive stays in the socket, and so do all frames behind it: between two ranks, start the
/// receives of a call before waiting for anything that the peer sends later. A send is done when the system has the
/// bytes, so a finished send does not imply that the peer makes the same call.
///
/// One thread at a time may use an exchange; abort is thread-safe.
class SocketExchange {
 public:
  class Request;

  /// `sockets`: nonblocking and connected, by rank; the entry of this rank is not open. Throws SystemError.
  explicit SocketExchange(std::vector<FileDescriptor> sockets);
  ~SocketExchange();

  /// Starts a message. Throws PeerError when the connection is broken, or the cause given to abort.
  Request start(Direction direction, const Buffer& buffer, uint64_t slot);

  /// Blocks until the request is done. Moves the other requests as well. Throws PeerError, TimeoutError, or the cause
  /// given to abort.
  void finish(Request& request, Deadline deadline);

  /// Shuts all connections down, so that the other ranks notice.
  void abort(std::exception_ptr cause) noexcept;

 private:
  struct FrameHeader;
  struct Message;
  struct Peer;

  bool advance();
  bool write_some(Peer& peer);
  bool read_some(Peer& peer);
  bool take_frame(Peer& peer);
  size_t receive(Peer& peer, char* data, size_t bytes);
  void wait_for_sockets(int milliseconds);
  void cancel(Message& message);
  void throw_if_aborted();

  std::vector<Peer> peers_;     // by rank
  std::vector<pollfd> polled_;  // the sockets by rank, then waker_
  const FileDescriptor waker_;  // readable after abort
  std::atomic<bool> is_aborted_{false};
  std::mutex mutex_;
  std::exception_ptr cause_;  // guarded by mutex_
};

/// A message in transit. Its destructor cancels an unfinished message and, if a part of the message was moved, shuts
/// the connection down.
class SocketExchange::Request {
 public:
  Request(Request&&) noexcept;
  Request& operator=(Request&&) = delete;
  ~Request();

 private:
  friend class SocketExchange;
  Request(SocketExchange& exchange, std::unique_ptr<Message> message);

  SocketExchange& exchange_;
  std::unique_ptr<Message> message_;  // null after a move
};

}  // namespace lockstep::gloo_backend
