#include "rendezvous/store/store_server.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include <lockstep/error.h>

#include "base/connection_acceptor.h"
#include "base/log.h"
#include "base/start_thread.h"
#include "base/text.h"
#include "rendezvous/net/output_buffer.h"
#include "rendezvous/net/rejection_log.h"
#include "rendezvous/net/tls.h"
#include "rendezvous/store/coordinator.h"

// Overview.
//
// One thread serves all connections with epoll and never blocks. It moves bytes: sockets, TLS, messages and their
// limits are here. What messages mean (keys, ranks that have joined, heartbeats, the first cause of a failure) is in
// the Coordinator, which has no sockets and is tested alone. The loop passes events (connected, received, heard, lost)
// and the time (tick) to it, and sends its messages (take_outgoing).
//
// Other threads call StoreServer. They store their requests under mutex_ and wake the loop, which publishes results
// there: the ranks that have joined, the first cause, and whether all ranks have acknowledged the end of the job.
//
// Anyone who reaches the port can connect. A connection is a stranger until TLS has proven that it knows the secret.
// Strangers are limited in number, bytes and time, and if descriptors run out, one of them is closed.

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

// A stranger is a connection that has not authenticated yet.
constexpr size_t kMaxStrangers = 64;
constexpr size_t kStrangerBytes = 4 << 10;
constexpr auto kStrangerTime = std::chrono::seconds(2);
constexpr size_t kMaxUnsent = 256 << 20;  // per connection; beyond it the client is considered hung
constexpr auto kServerTick = std::chrono::milliseconds(50);
constexpr auto kShutdownTimeout = std::chrono::milliseconds(500);
// A longer pause between two iterations means that this process did not run.
constexpr auto kServerStall = std::chrono::seconds(1);
// While a client sends a large message, which may take longer than its heartbeat limit, its heartbeats wait behind it.
constexpr auto kSignOfLife = std::chrono::milliseconds(250);

constexpr uint64_t kListener = 0;
constexpr uint64_t kWaker = 1;

[[noreturn]] void fail_server(const char* call) {
  throw SystemError(text("could not run the store: ", call, ": ", std::strerror(errno)));
}

}  // namespace

namespace store_server {

/// One connection: its socket, TLS session, and partially sent or received messages.
struct ConnectedPeer {
  ConnectedPeer(FileDescriptor socket, const TlsContext& tls)
      : socket(std::move(socket)), name(peer_of(this->socket)), session(tls) {}

  FileDescriptor socket;
  ClosedInChildren closed_in_children{socket.get()};
  std::string name;  // address and port
  TlsSession session;
  Decoder decoder{};
  OutputBuffer unsent{};
  Clock::time_point last_sent{};  // when bytes were last sent to the peer
  size_t bytes_before_proof = 0;
  bool is_known = false;     // authenticated
  bool is_closing = false;   // shut down once everything is sent
  bool wants_write = false;  // registered for EPOLLOUT
};

}  // namespace store_server

using store_server::ConnectedPeer;

std::string key_identity(int generation) {
  return text("lockstep-1/", generation);
}

class StoreServer::Loop {
 public:
  explicit Loop(const Options& options)
      : listener_(listen_at(options.endpoint)),
        waker_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        poller_(::epoll_create1(EPOLL_CLOEXEC)),
        tls_(TlsContext::Side::kServer, key_identity(options.generation), options.secret.key(options.generation)),
        coordinator_({options.role, this_process(), options.rank}, options.members) {
    if (!waker_.is_open() || !poller_.is_open()) fail_server("eventfd or epoll_create1");
    watch(listener_.get(), kListener, EPOLLIN);
    watch(waker_.get(), kWaker, EPOLLIN);
  }

  int port() const { return port_of(listener_); }

  void await_departures(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    departed_.wait_for(lock, limit, [&] { return known_ == 0; });
  }

  void stop() {
    {
      std::lock_guard lock(mutex_);
      should_stop_ = true;
    }
    wake();
  }

  Failure end_job(const Failure& cause) {
    std::unique_lock lock(mutex_);
    if (!ending_) ending_ = cause;
    wake();
    acknowledged_.wait(lock, [&] { return all_acknowledged_; });
    return *first_cause_;
  }

  std::optional<Failure> first_cause() {
    std::lock_guard lock(mutex_);
    return first_cause_;
  }

  std::set<int> joined() {
    std::lock_guard lock(mutex_);
    return joined_;
  }

  size_t keys() const { return keys_; }

  void run() {
    auto last_iteration = Clock::now();
    while (!should_end()) {
      std::array<epoll_event, 64> events;
      int count = ::epoll_wait(poller_.get(), events.data(), events.size(), static_cast<int>(kServerTick.count()));
      auto now = Clock::now();
      // This process was stopped. Heartbeats of the ranks may still be unread in the sockets.
      if (now - last_iteration > kServerStall) coordinator_.reset_heartbeats(now);
      last_iteration = now;
      for (int i = 0; i < count; ++i) handle(events[i], now);
      acceptor_.resume(now);
      coordinator_.tick(now);
      // After the connections: the loss of a rank's connection is a more precise cause than the launcher's report.
      end_job_if_asked(now);
      deliver(now);
      publish_joined();
      publish_first_cause();
      keys_ = coordinator_.keys();
      drop_slow_strangers(now);
    }
  }

 private:
  using Connection = Coordinator::Connection;

  void watch(int descriptor, uint64_t name, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = name;
    if (::epoll_ctl(poller_.get(), EPOLL_CTL_ADD, descriptor, &event) != 0) fail_server("epoll_ctl");
  }

  // close() alone would not end the connection while a forked child also has the socket open.
  void end(std::unordered_map<Connection, ConnectedPeer>::iterator peer) {
    ::epoll_ctl(poller_.get(), EPOLL_CTL_DEL, peer->second.socket.get(), nullptr);
    ::shutdown(peer->second.socket.get(), SHUT_RDWR);
    strangers_.remove(peer->first);
    peers_.erase(peer);
  }

  bool should_end() const { return is_stopping_ && (peers_.empty() || Clock::now() >= shutdown_deadline_); }

  void handle(const epoll_event& event, Clock::time_point now) {
    if (event.data.u64 == kListener) return accept_some(now);
    if (event.data.u64 == kWaker) return wake_up(now);
    if (event.events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(event.data.u64, now);
    if (event.events & EPOLLOUT) flush(event.data.u64, now);
  }

  void wake() {
    uint64_t one = 1;
    [[maybe_unused]] auto written = ::write(waker_.get(), &one, sizeof one);
  }

  void wake_up(Clock::time_point now) {
    uint64_t count = 0;
    [[maybe_unused]] auto read = ::read(waker_.get(), &count, sizeof count);
    std::unique_lock lock(mutex_);
    if (!should_stop_ || is_stopping_) return;
    lock.unlock();
    begin_stopping(now);
  }

  void end_job_if_asked(Clock::time_point now) {
    std::lock_guard lock(mutex_);
    if (!ending_ || is_ending_) return;
    is_ending_ = true;
    coordinator_.end_job(*ending_, now);
    coordinator_.request_acknowledgements(now);
  }

  void publish_joined() {
    if (coordinator_.joined().size() == published_) return;
    std::lock_guard lock(mutex_);
    joined_ = coordinator_.joined();
    published_ = joined_.size();
  }

  void publish_first_cause() {
    if (!coordinator_.job_failure()) return;
    std::lock_guard lock(mutex_);
    if (!first_cause_) first_cause_ = *coordinator_.first_failure();
    if (!is_ending_ || all_acknowledged_ || !coordinator_.all_acknowledged()) return;
    all_acknowledged_ = true;
    acknowledged_.notify_all();
  }

  void begin_stopping(Clock::time_point now) {
    is_stopping_ = true;
    acceptor_.stop();
    shutdown_deadline_ = now + kShutdownTimeout;
    std::vector<Connection> strangers;
    for (auto& [name, peer] : peers_) {
      if (!peer.is_known) {
        strangers.push_back(name);
        continue;
      }
      try {
        peer.session.send(encode({Verb::kClosing}));
        peer.unsent.append(peer.session.take_output());
      } catch (const TlsError&) {
        strangers.push_back(name);
      }
    }
    for (Connection name : strangers) end(peers_.find(name));
    std::vector<Connection> known;
    for (auto& [name, peer] : peers_) known.push_back(name);
    for (Connection name : known) flush(name, now);
  }

  // --- strangers: connections that have not authenticated yet

  void accept_some(Clock::time_point now) {
    acceptor_.accept_some(
        now, [&](FileDescriptor socket, const sockaddr_storage&) { add(std::move(socket), now); },
        [&](int error) { return make_room(error, now); });
  }

  void add(FileDescriptor socket, Clock::time_point now) {
    if (strangers_.size() >= kMaxStrangers)
      reject(strangers_.to_displace(), "too many unauthenticated connections", now);
    try {
      const Connection name = next_name_++;
      watch(socket.get(), name, EPOLLIN);
      const auto& peer = peers_.try_emplace(name, std::move(socket), tls_).first->second;
      strangers_.add(name, peer.name.substr(0, peer.name.rfind(':')), now);
    } catch (const SystemError& error) {  // epoll_ctl failed
      log_warning_async(error.what());
    }
  }

  // Closes a stranger. A rank authenticates within milliseconds, so a flood from the rank's own host seldom outlasts
  // it.
  bool make_room(int error, Clock::time_point now) {
    const std::string why = text(std::strerror(error), "; raise the limit of open files (ulimit -n)");
    if (strangers_.size() == 0) {
      log_warning_async(text("the store cannot accept connections: ", why));
      return false;
    }
    reject(strangers_.to_displace(), why, now);
    return true;
  }

  void drop_slow_strangers(Clock::time_point now) {
    for (Connection name : strangers_.older_than(now - kStrangerTime))
      reject(name, "it did not prove that it knows the job's secret within 2 s", now);
  }

  void reject(Connection name, const std::string& why, Clock::time_point now) {
    auto found = peers_.find(name);
    rejections_.count(found->second.name, why, now);
    end(found);
  }

  // --- authenticated clients

  void count_known(int change) {
    std::lock_guard lock(mutex_);
    known_ += change;
    departed_.notify_all();
  }

  void drop(Connection name, const std::string& reason, Clock::time_point now) {
    auto found = peers_.find(name);
    if (found == peers_.end()) return;
    if (!found->second.is_known) return reject(name, reason, now);
    end(found);
    if (!is_stopping_) coordinator_.lost(name, reason, now);
    count_known(-1);
  }

  void receive(Connection name, Clock::time_point now) {
    auto found = peers_.find(name);
    if (found == peers_.end()) return;
    ConnectedPeer& peer = found->second;
    std::array<char, 64 << 10> bytes;
    size_t most = peer.is_known ? bytes.size() : kStrangerBytes - peer.bytes_before_proof;
    ssize_t got = ::recv(peer.socket.get(), bytes.data(), most, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got < 0) return drop(name, text("its connection broke (", std::strerror(errno), ")"), now);
    if (got == 0) return drop(name, "its connection was closed", now);
    try {
      receive_bytes(name, peer, {bytes.data(), static_cast<size_t>(got)}, now);
    } catch (const TlsError& error) {
      send_tls_alert(peer);
      drop(name, text("it does not know the job's secret, or does not speak the store's protocol (", error.what(), ")"),
           now);
    } catch (const ProtocolError& error) {
      drop(name, text("it violated the store's protocol (", error.what(), ")"), now);
    }
  }

  void receive_bytes(Connection name, ConnectedPeer& peer, std::string_view bytes, Clock::time_point now) {
    peer.decoder.feed(peer.session.receive(bytes));
    peer.unsent.append(peer.session.take_output());
    if (!peer.is_known) {
      peer.bytes_before_proof += bytes.size();
      if (peer.session.is_authenticated()) {
        peer.is_known = true;
        peer.last_sent = now;  // the coordinator sends kWelcome
        strangers_.remove(name);
        count_known(1);
        if (is_stopping_) return drop(name, "the store is shutting down", now);
        coordinator_.connected(name);
      } else if (peer.bytes_before_proof >= kStrangerBytes) {
        return reject(name, "it sent 4 KiB without authenticating", now);
      }
    }
    if (peer.is_known) {
      while (auto message = peer.decoder.next()) coordinator_.received(name, *message, now);
      coordinator_.heard(name, now);
      if (now - peer.last_sent > kSignOfLife && !peer.is_closing) tell(peer, {Verb::kHeartbeatReply}, now);
    }
    if (!peer.unsent.empty()) flush(name, now);
  }

  // Sends the TLS alert with the reason, without blocking.
  static void send_tls_alert(ConnectedPeer& peer) {
    auto alert = peer.session.take_output();
    [[maybe_unused]] auto sent = ::send(peer.socket.get(), alert.data(), alert.size(), MSG_NOSIGNAL);
  }

  static std::string encoded(const StoreMessage& message) {
    try {
      return encode(message);
    } catch (const UsageError&) {  // the answers of many ranks to one question
      return encode({Verb::kRefused, message.id, {"store: the answer exceeds 64 MiB"}});
    }
  }

  static void tell(ConnectedPeer& peer, const StoreMessage& message, Clock::time_point now) {
    peer.session.send(encoded(message));
    peer.unsent.append(peer.session.take_output());
    peer.last_sent = now;
  }

  // Sends the coordinator's messages. Losing a connection may produce more messages, hence the loop.
  void deliver(Clock::time_point now) {
    for (auto batch = coordinator_.take_outgoing(); !batch.empty(); batch = coordinator_.take_outgoing()) {
      std::set<Connection> recipients;
      for (const auto& [to, message] : batch) {
        auto found = peers_.find(to);
        if (found == peers_.end()) continue;
        ConnectedPeer& peer = found->second;
        try {
          tell(peer, message, now);
        } catch (const TlsError& error) {
          drop(to, text("its TLS connection broke (", error.what(), ")"), now);
          continue;
        }
        if (message.verb == Verb::kClosing) peer.is_closing = true;
        recipients.insert(to);
      }
      for (Connection name : recipients) flush(name, now);
    }
  }

  void flush(Connection name, Clock::time_point now) {
    auto found = peers_.find(name);
    if (found == peers_.end()) return;
    ConnectedPeer& peer = found->second;
    while (!peer.unsent.empty()) {
      ssize_t put = ::send(peer.socket.get(), peer.unsent.data(), peer.unsent.size(), MSG_NOSIGNAL);
      if (put < 0 && errno == EINTR) continue;
      if (put < 0 && errno == EAGAIN) break;
      if (put < 0) return drop(name, text("its connection broke (", std::strerror(errno), ")"), now);
      peer.unsent.remove(static_cast<size_t>(put));
    }
    if (peer.unsent.size() > kMaxUnsent) return drop(name, "it does not read the messages sent to it", now);
    if (peer.unsent.empty() && peer.is_closing) ::shutdown(peer.socket.get(), SHUT_WR);
    bool wants_write = !peer.unsent.empty();
    if (wants_write == peer.wants_write) return;
    peer.wants_write = wants_write;
    epoll_event event{};
    event.events = wants_write ? EPOLLIN | EPOLLOUT : EPOLLIN;
    event.data.u64 = name;
    ::epoll_ctl(poller_.get(), EPOLL_CTL_MOD, peer.socket.get(), &event);
  }

  const FileDescriptor listener_;
  const ClosedInChildren closed_in_children_{listener_.get()};
  const FileDescriptor waker_;
  const FileDescriptor poller_;
  const TlsContext tls_;
  std::mutex mutex_;
  std::condition_variable departed_;
  std::condition_variable acknowledged_;
  int known_ = 0;                       // guarded by mutex_: authenticated connections
  bool should_stop_ = false;            // guarded by mutex_
  std::optional<Failure> ending_;       // guarded by mutex_: the argument of end_job()
  std::optional<Failure> first_cause_;  // guarded by mutex_
  bool all_acknowledged_ = false;       // guarded by mutex_: after end_job(), all ranks have acknowledged
  std::set<int> joined_;                // guarded by mutex_
  std::atomic<size_t> keys_{0};

  // Used by the loop's thread only:
  Coordinator coordinator_;
  std::unordered_map<Connection, ConnectedPeer> peers_;
  Connection next_name_ = 2;
  ConnectionAcceptor acceptor_{listener_.get(), poller_.get(), kListener};
  Strangers strangers_;   // the peers that are not known
  size_t published_ = 0;  // size of joined_
  RejectionLog rejections_{"the store"};
  bool is_ending_ = false;  // ending_ was passed to the coordinator
  bool is_stopping_ = false;
  Clock::time_point shutdown_deadline_{};
};

StoreServer::StoreServer(Options options) : loop_(std::make_unique<Loop>(options)) {
  thread_ = start_thread("the job's store", [this] { loop_->run(); });
}

StoreServer::~StoreServer() {
  if (!owner_.is_this()) {  // a forked child has no thread to join or detach
    abandon(new std::thread(std::move(thread_)));
    return;
  }
  loop_->stop();
  thread_.join();
}

void StoreServer::await_departures(std::chrono::milliseconds limit) const {
  loop_->await_departures(limit);
}

Failure StoreServer::end_job(const Failure& cause) {
  return loop_->end_job(cause);
}

std::optional<Failure> StoreServer::first_cause() const {
  return loop_->first_cause();
}

std::set<int> StoreServer::joined() const {
  return loop_->joined();
}

size_t StoreServer::keys() const {
  return loop_->keys();
}

int StoreServer::port() const {
  return loop_->port();
}

}  // namespace lockstep
