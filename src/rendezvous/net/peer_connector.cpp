#include "rendezvous/net/peer_connector.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <lockstep/error.h>

#include "base/deadline.h"
#include "base/text.h"
#include "rendezvous/net/peer_proof.h"
#include "rendezvous/store/protocol.h"

namespace lockstep {
namespace {

// A caller is a connection that has not authenticated yet.
constexpr size_t kMaxCallers = 64;  // in addition to the ranks, which may all connect at once
constexpr auto kCallerTime = std::chrono::seconds(2);
constexpr int kAcceptsAtOnce = 16;  // then the callers that are connected already are handled
// The kernel retransmits SYN packets with growing intervals, so a new attempt reaches a flooded port sooner.
constexpr auto kConnectAttempt = std::chrono::seconds(3);

std::string listener_key(int rank) {
  return text("listener/", rank);
}

int poll_milliseconds(std::chrono::steady_clock::time_point until) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 60 * 60 * 1000));
}

/// Errors that can be temporary. With any other error, the network is faulty or the rank is gone.
bool may_connect_later(int error) {
  return error == ETIMEDOUT || error == EADDRNOTAVAIL || error == ECONNRESET || error == ECONNABORTED;
}

bool is_out_of_room(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

bool send_all(const FileDescriptor& socket, const std::string& bytes) {
  // A challenge or proof always fits into the send buffer of a new connection.
  return ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
}

}  // namespace

/// A connection that has not authenticated yet.
struct PeerConnector::Caller {
  FileDescriptor socket;
  std::string name;
  peer_proof::Listener proof;
  std::string heard{};
  Clock::time_point since = Clock::now();
};

PeerConnector::PeerConnector(Options options)
    : options_(std::move(options)),
      waker_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      listener_(listen_at({options_.host, 0}, options_.remedy)),
      rejections_(text("rank ", options_.rank)) {
  if (!waker_.is_open()) throw SystemError(text("eventfd: ", std::strerror(errno)));
}

PeerConnector::~PeerConnector() = default;

std::vector<FileDescriptor> PeerConnector::connect() {
  deadline_ = deadline_after(options_.timeout);
  const Endpoint own_endpoint{local_address(listener_), port_of(listener_)};
  options_.store->set(listener_key(options_.rank), pack({to_string(own_endpoint), key_.bytes()}));
  std::vector<FileDescriptor> sockets(options_.size);
  const auto addresses = addresses_of_lower_ranks();
  for (int peer = 0; peer < options_.rank; ++peer) sockets[peer] = reach(peer, addresses[peer]);
  accept_higher_ranks(sockets);
  callers_.clear();
  listener_ = {};
  return sockets;
}

void PeerConnector::give_up(std::exception_ptr cause) noexcept {
  {
    std::lock_guard lock(mutex_);
    if (!cause_) cause_ = cause;
  }
  const uint64_t one = 1;
  [[maybe_unused]] auto written = ::write(waker_.get(), &one, sizeof one);
}

void PeerConnector::throw_if_given_up() {
  std::lock_guard lock(mutex_);
  if (cause_) std::rethrow_exception(cause_);
}

/// Returns whether the descriptor becomes ready before `until`; a negative descriptor never does. Throws the cause of
/// give_up().
bool PeerConnector::wait(int descriptor, short events, Clock::time_point until) {
  for (;;) {
    pollfd polled[2]{{waker_.get(), POLLIN, 0}, {descriptor, events, 0}};
    if (::poll(polled, 2, poll_milliseconds(until)) < 0 && errno != EINTR)
      throw SystemError(text("poll: ", std::strerror(errno)));
    throw_if_given_up();
    if (polled[1].revents != 0) return true;
    if (Clock::now() >= until) return false;
  }
}

std::string PeerConnector::with_remedy(const std::string& message) const {
  return options_.remedy ? text(message, "; ", options_.remedy) : message;
}

// --- connections to lower ranks

/// Blocks until all lower ranks have published their addresses. One request: with N ranks, a request for each address
/// would be N * N / 2 requests to the store.
std::vector<std::string> PeerConnector::addresses_of_lower_ranks() {
  std::vector<std::string> keys;
  for (int peer = 0; peer < options_.rank; ++peer) keys.push_back(listener_key(peer));
  try {
    return options_.store->multi_get(keys, options_.timeout);
  } catch (const TimeoutError&) {
    std::vector<int> missing;
    for (int peer = 0; peer < options_.rank; ++peer)
      if (!options_.store->check({keys[peer]})) missing.push_back(peer);
    throw TimeoutError(text(missing.size() == 1 ? "rank " : "ranks ", enumerate(missing),
                            " did not publish an address within ", options_.timeout.count(), " ms"));
  }
}

FileDescriptor PeerConnector::reach(int peer, const std::string& address) {
  const auto entry = unpack(address);
  const Endpoint endpoint = parse_endpoint(entry.at(0));
  const Secret key = Secret::from_bytes(entry.at(1));
  std::string reason;
  for (auto pause = kFirstPause;; pause = std::min(pause * 2, kMaxPause)) {
    auto socket = try_to_reach(peer, endpoint, key, reason);
    if (socket.is_open()) return socket;
    wait(-1, 0, std::min(deadline_, Clock::now() + pause));
    if (Clock::now() >= deadline_)
      throw TimeoutError(with_remedy(text("could not connect to rank ", peer, " at ", to_string(endpoint), " within ",
                                          options_.timeout.count(), " ms: ", reason)));
  }
}

/// Returns a socket that is not open, and sets `reason`, if the attempt can be repeated.
FileDescriptor PeerConnector::try_to_reach(int peer, const Endpoint& endpoint, const Secret& key, std::string& reason) {
  const auto resolution = resolve(endpoint.host, endpoint.port);
  if (resolution.addresses.empty())
    throw PeerError(text("rank ", peer, " listens at ", to_string(endpoint), ": ", resolution.failure));
  const Address& address = resolution.addresses.front();
  int error = 0;
  auto socket = begin_connecting(address, error);
  if (error == EINPROGRESS)
    error = wait(socket.get(), POLLOUT, std::min(deadline_, Clock::now() + kConnectAttempt))
                ? connection_error(socket, address)
                : ETIMEDOUT;
  if (error != 0) reason = std::strerror(error);
  if (may_connect_later(error)) return {};
  if (error != 0)
    throw PeerError(with_remedy(text("could not connect to rank ", peer, " at ", to_string(endpoint), ": ", reason)));

  peer_proof::Connector proof(key, options_.rank, peer);
  const auto challenge = receive(socket, peer_proof::kChallengeBytes, reason);
  if (challenge.empty()) return {};
  if (!send_all(socket, proof.answer(challenge))) {
    reason = text("its connection broke (", std::strerror(errno), ")");
    return {};
  }
  const auto listeners_proof = receive(socket, peer_proof::kProofBytes, reason);
  if (listeners_proof.empty()) return {};
  if (proof.check(listeners_proof)) return socket;
  reason = "the listener at this address does not know the job's secret";
  return {};
}

/// Returns "" and sets `reason` if fewer bytes arrive.
std::string PeerConnector::receive(const FileDescriptor& socket, size_t bytes, std::string& reason) {
  std::string received(bytes, '\0');
  for (size_t got = 0; got < bytes;) {
    if (!wait(socket.get(), POLLIN, deadline_)) {
      reason = "it does not answer";
      return "";
    }
    const ssize_t more = ::recv(socket.get(), received.data() + got, bytes - got, 0);
    if (more < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (more <= 0) {
      reason = more == 0 ? "it closed the connection" : text("its connection broke (", std::strerror(errno), ")");
      return "";
    }
    got += static_cast<size_t>(more);
  }
  return received;
}

// --- connections from higher ranks

std::string PeerConnector::describe_missing(const std::vector<FileDescriptor>& sockets) const {
  std::vector<std::string> missing;
  for (int rank = options_.rank + 1; rank < options_.size; ++rank)
    if (!sockets[rank].is_open()) missing.push_back(std::to_string(rank));
  return missing.empty() ? "" : text("rank ", enumerate(missing));
}

void PeerConnector::accept_higher_ranks(std::vector<FileDescriptor>& sockets) {
  for (;;) {
    const auto missing = describe_missing(sockets);
    if (missing.empty()) return;
    if (Clock::now() >= deadline_)
      throw TimeoutError(with_remedy(text(missing, " did not connect to ",
                                          to_string(Endpoint{local_address(listener_), port_of(listener_)}), " within ",
                                          options_.timeout.count(), " ms; ", rejected_count_,
                                          " unauthenticated connections were rejected")));
    std::vector<pollfd> polled{{waker_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    for (const Caller& caller : callers_) polled.push_back({caller.socket.get(), POLLIN, 0});
    const auto until = callers_.empty() ? deadline_ : std::min(deadline_, callers_.front().since + kCallerTime);
    if (::poll(polled.data(), polled.size(), poll_milliseconds(until)) < 0 && errno != EINTR)
      throw SystemError(text("poll: ", std::strerror(errno)));
    throw_if_given_up();
    auto caller = callers_.begin();
    for (size_t i = 2; i < polled.size(); ++i) {
      const auto next = std::next(caller);
      if (polled[i].revents != 0) receive_answer(caller, sockets);
      caller = next;
    }
    while (!callers_.empty() && Clock::now() - callers_.front().since >= kCallerTime)
      reject(callers_.begin(), "it did not prove that it knows the job's secret within 2 s");
    if (polled[1].revents != 0) accept_callers();
  }
}

void PeerConnector::accept_callers() {
  for (int turn = 0; turn < kAcceptsAtOnce; ++turn) {
    FileDescriptor socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.is_open()) {
      if (is_out_of_room(errno)) make_room(errno);
      return;
    }
    if (callers_.size() >= kMaxCallers + options_.size)
      reject(callers_.begin(), "too many unauthenticated connections");
    auto name = peer_of(socket);
    callers_.push_back({std::move(socket), std::move(name), {key_, options_.rank}});
    if (!send_all(callers_.back().socket, callers_.back().proof.challenge()))
      reject(std::prev(callers_.end()), "its connection broke");
  }
}

/// No descriptors left: closes the oldest caller.
void PeerConnector::make_room(int error) {
  // accept4() allocates a descriptor first, so it can fail with EMFILE although no connection is waiting.
  pollfd waiting{listener_.get(), POLLIN, 0};
  if (::poll(&waiting, 1, 0) <= 0) return;
  const auto why = text(std::strerror(error), "; raise the limit of open files (ulimit -n)");
  if (callers_.empty()) throw SystemError(text("cannot accept connections from other ranks: ", why));
  reject(callers_.begin(), why);
}

void PeerConnector::receive_answer(std::list<Caller>::iterator caller, std::vector<FileDescriptor>& sockets) {
  char bytes[peer_proof::kAnswerBytes];
  const ssize_t got = ::recv(caller->socket.get(), bytes, peer_proof::kAnswerBytes - caller->heard.size(), 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) return reject(caller, "it disconnected before it authenticated");
  caller->heard.append(bytes, static_cast<size_t>(got));
  if (caller->heard.size() < peer_proof::kAnswerBytes) return;
  const auto accepted = caller->proof.check(caller->heard);
  if (!accepted) return reject(caller, "it does not know the job's secret");
  if (accepted->rank <= options_.rank || accepted->rank >= options_.size)
    return reject(caller, text("it claims to be rank ", accepted->rank, ", which does not connect to this rank"));
  if (!send_all(caller->socket, accepted->proof)) return reject(caller, "its connection broke");
  // A rank that connects again has lost its first connection.
  sockets[accepted->rank] = std::move(caller->socket);
  callers_.erase(caller);
}

void PeerConnector::reject(std::list<Caller>::iterator caller, const std::string& why) {
  ++rejected_count_;
  rejections_.count(caller->name, why, Clock::now());
  callers_.erase(caller);
}

}  // namespace lockstep
