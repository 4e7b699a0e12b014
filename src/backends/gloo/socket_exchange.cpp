#include "backends/gloo/socket_exchange.h"

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep::gloo_backend {
namespace {

constexpr size_t kMoveBytes = 256 << 10;     // most bytes moved by one system call, so that all sockets get their turn
constexpr size_t kReadAheadBytes = 4 << 10;  // a header and a short message arrive with one system call
constexpr int kMaxPoll = 60 * 60 * 1000;     // ms

[[noreturn]] void throw_broken(int rank, const std::string& reason) {
  throw PeerError(text("the connection to rank ", rank, " is broken: ", reason));
}

bool would_block() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

}  // namespace

/// Begins each message on a socket. Both ends have the same byte order, because they run the same program.
struct SocketExchange::FrameHeader {
  uint64_t slot = 0;
  uint64_t bytes = 0;
};

struct SocketExchange::Message {
  Direction direction;
  Buffer buffer;
  FrameHeader header;
  size_t moved = 0;  // bytes, with the header if this is a send
  bool is_done = false;
};

struct SocketExchange::Peer {
  size_t buffered() const { return ahead_end - ahead_begin; }
  bool has_receives() const { return incoming || !receives.empty(); }
  // Without a matching receive, the header stays buffered, and more bytes are of no use.
  bool wants_bytes() const { return incoming || (!receives.empty() && buffered() < sizeof(FrameHeader)); }

  int rank = 0;
  FileDescriptor socket;
  std::deque<Message*> sends;     // the front may be partly sent
  std::deque<Message*> receives;  // none has received anything yet
  Message* incoming = nullptr;    // the receive whose data arrives now
  bool may_write = true;          // false after the socket was full, until it is polled
  bool may_read = false;          // true after the socket was polled, until it is empty
  size_t ahead_begin = 0;
  size_t ahead_end = 0;
  std::unique_ptr<std::array<char, kReadAheadBytes>> ahead = std::make_unique<std::array<char, kReadAheadBytes>>();
};

SocketExchange::Request::Request(SocketExchange& exchange, std::unique_ptr<Message> message)
    : exchange_(exchange), message_(std::move(message)) {}
SocketExchange::Request::Request(Request&&) noexcept = default;
SocketExchange::Request::~Request() {
  if (message_ && !message_->is_done) exchange_.cancel(*message_);
}

SocketExchange::SocketExchange(std::vector<FileDescriptor> sockets)
    : peers_(sockets.size()), polled_(sockets.size() + 1), waker_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!waker_.is_open()) throw SystemError(text("eventfd: ", std::strerror(errno), "; raise the limit of open files"));
  for (size_t rank = 0; rank < sockets.size(); ++rank) {
    peers_[rank].rank = static_cast<int>(rank);
    peers_[rank].socket = std::move(sockets[rank]);
  }
}

SocketExchange::~SocketExchange() = default;

void SocketExchange::throw_if_aborted() {
  if (!is_aborted_) return;
  std::lock_guard lock(mutex_);
  std::rethrow_exception(cause_);
}

SocketExchange::Request SocketExchange::start(Direction direction, const Buffer& buffer, uint64_t slot) {
  throw_if_aborted();
  Peer& peer = peers_[buffer.peer];
  Request request(*this, std::make_unique<Message>(Message{direction, buffer, {slot, buffer.bytes}}));
  Message* message = request.message_.get();
  if (direction == Direction::kRecv) {
    peer.receives.push_back(message);
  } else {
    peer.sends.push_back(message);
    if (peer.sends.size() == 1 && peer.may_write) write_some(peer);
  }
  return request;
}

void SocketExchange::finish(Request& request, Deadline deadline) {
  const Message& message = *request.message_;
  while (!message.is_done) {
    throw_if_aborted();
    if (advance()) {
      if (!message.is_done) wait_for_sockets(0);
      continue;
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0)
      throw TimeoutError(text("timed out: rank ", message.buffer.peer,
                              message.direction == Direction::kSend ? " did not receive" : " did not send",
                              " the data of this call"));
    wait_for_sockets(static_cast<int>(std::min<int64_t>(left.count(), kMaxPoll)));
  }
}

/// Moves at most kMoveBytes in each direction of each socket. Returns whether anything was moved.
bool SocketExchange::advance() {
  bool moved = false;
  for (Peer& peer : peers_) {
    if (!peer.sends.empty() && peer.may_write) moved |= write_some(peer);
    if (peer.has_receives()) moved |= read_some(peer);
  }
  return moved;
}

bool SocketExchange::write_some(Peer& peer) {
  Message& message = *peer.sends.front();
  constexpr size_t kHeader = sizeof(FrameHeader);
  const size_t of_header = std::min(message.moved, kHeader);
  const size_t of_data = message.moved - of_header;
  iovec parts[2] = {
      {reinterpret_cast<char*>(&message.header) + of_header, kHeader - of_header},
      {static_cast<char*>(message.buffer.data) + of_data, std::min(kMoveBytes, message.buffer.bytes - of_data)}};
  msghdr both{};
  both.msg_iov = parts;
  both.msg_iovlen = 2;
  const size_t offered = parts[0].iov_len + parts[1].iov_len;
  const ssize_t sent = ::sendmsg(peer.socket.get(), &both, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0 && !would_block()) {
    throw_if_aborted();
    throw_broken(peer.rank, std::strerror(errno));
  }
  peer.may_write = sent == static_cast<ssize_t>(offered);
  if (sent <= 0) return false;
  message.moved += static_cast<size_t>(sent);
  if (message.moved < kHeader + message.buffer.bytes) return true;
  message.is_done = true;
  peer.sends.pop_front();
  return true;
}

/// Returns 0 if the socket is empty.
size_t SocketExchange::receive(Peer& peer, char* data, size_t bytes) {
  const ssize_t received = ::recv(peer.socket.get(), data, bytes, MSG_DONTWAIT);
  if (received < 0 && would_block()) {
    peer.may_read = false;
    return 0;
  }
  if (received <= 0) {
    const int error = errno;
    throw_if_aborted();
    throw_broken(peer.rank, received == 0 ? "the rank closed it" : std::strerror(error));
  }
  peer.may_read = static_cast<size_t>(received) == bytes;
  return static_cast<size_t>(received);
}

bool SocketExchange::read_some(Peer& peer) {
  bool moved = false;
  if (!peer.incoming && peer.wants_bytes() && peer.may_read) {
    std::memmove(peer.ahead->data(), peer.ahead->data() + peer.ahead_begin, peer.buffered());
    peer.ahead_end = peer.buffered();
    peer.ahead_begin = 0;
    const size_t received = receive(peer, peer.ahead->data() + peer.ahead_end, kReadAheadBytes - peer.ahead_end);
    peer.ahead_end += received;
    moved = received > 0;
  }
  while (!peer.incoming && take_frame(peer)) moved = true;
  if (!peer.incoming || !peer.may_read) return moved;

  Message& message = *peer.incoming;
  const size_t received = receive(peer, static_cast<char*>(message.buffer.data) + message.moved,
                                  std::min(kMoveBytes, message.buffer.bytes - message.moved));
  message.moved += received;
  if (message.moved == message.buffer.bytes) {
    message.is_done = true;
    peer.incoming = nullptr;
  }
  return moved || received > 0;
}

/// Assigns the next buffered frame to its receive, and copies the data that is buffered as well. Returns false if no
/// header is buffered or no receive has the frame's slot.
bool SocketExchange::take_frame(Peer& peer) {
  FrameHeader header;
  if (peer.buffered() < sizeof header) return false;
  std::memcpy(&header, peer.ahead->data() + peer.ahead_begin, sizeof header);
  const auto found = std::find_if(peer.receives.begin(), peer.receives.end(),
                                  [&](const Message* message) { return message->header.slot == header.slot; });
  if (found == peer.receives.end()) return false;
  Message& message = **found;
  if (header.bytes != message.buffer.bytes)
    throw_broken(peer.rank, text("it sent ", header.bytes, " bytes where this rank expects ", message.buffer.bytes));
  peer.receives.erase(found);
  peer.ahead_begin += sizeof header;
  message.moved = std::min(message.buffer.bytes, peer.buffered());
  std::memcpy(message.buffer.data, peer.ahead->data() + peer.ahead_begin, message.moved);
  peer.ahead_begin += message.moved;
  message.is_done = message.moved == message.buffer.bytes;
  if (!message.is_done) peer.incoming = &message;
  return true;
}

/// Blocks until a socket is ready or abort is called. A socket that no message needs is not polled: an error of it
/// would be reported again and again.
void SocketExchange::wait_for_sockets(int milliseconds) {
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    const Peer& peer = peers_[rank];
    const int input = peer.wants_bytes() && !peer.may_read ? POLLIN : 0;
    const int output = !peer.sends.empty() && !peer.may_write ? POLLOUT : 0;
    polled_[rank] = {input | output ? peer.socket.get() : -1, static_cast<short>(input | output), 0};
  }
  polled_.back() = {waker_.get(), POLLIN, 0};
  if (::poll(polled_.data(), polled_.size(), milliseconds) <= 0) return;
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    const short ready = polled_[rank].revents;
    if (ready & (POLLIN | POLLHUP | POLLERR)) peers_[rank].may_read = true;
    if (ready & (POLLOUT | POLLHUP | POLLERR)) peers_[rank].may_write = true;
  }
}

void SocketExchange::cancel(Message& message) {
  Peer& peer = peers_[message.buffer.peer];
  if (peer.incoming == &message) peer.incoming = nullptr;
  std::erase(peer.receives, &message);
  std::erase(peer.sends, &message);
  if (message.moved > 0) ::shutdown(peer.socket.get(), SHUT_RDWR);
}

void SocketExchange::abort(std::exception_ptr cause) noexcept {
  {
    std::lock_guard lock(mutex_);
    if (cause_) return;
    cause_ = std::move(cause);
  }
  is_aborted_ = true;
  for (const Peer& peer : peers_)
    if (peer.socket.is_open()) ::shutdown(peer.socket.get(), SHUT_RDWR);
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(waker_.get(), &one, sizeof one);
}

}  // namespace lockstep::gloo_backend
