#include "ui/http_server.h"

#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string_view>
#include <thread>

#include <fmt/format.h>

#include <lockstep/error.h>

#include "base/connection_acceptor.h"
#include "base/start_thread.h"
#include "ui/worker_threads.h"

namespace lockstep::ui {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr size_t kWorkers = 8;                   // a file on a slow disk delays one worker
constexpr size_t kSentInARow = size_t{1} << 20;  // bytes; then other events are handled
constexpr milliseconds kTick(100);               // between two checks of the time limits
constexpr size_t kMaxDiscarded = 256 << 10;      // bytes that a client sends after its last response

constexpr uint64_t kListener = 0;
constexpr uint64_t kWaker = 1;

/// The remote address of a connection, as bytes.
std::string address_of(const sockaddr_storage& from) {
  const auto bytes = [](const auto& address) {
    return std::string(reinterpret_cast<const char*>(&address), sizeof address);
  };
  return from.ss_family == AF_INET6 ? bytes(reinterpret_cast<const sockaddr_in6&>(from).sin6_addr)
                                    : bytes(reinterpret_cast<const sockaddr_in&>(from).sin_addr);
}

HttpResponse plain_text(int status, std::string text) {
  return {.status = status, .content_type = "text/plain; charset=utf-8", .body = std::move(text)};
}

}  // namespace

/// A connection receives a request, waits for its response, and sends the response; then it receives the next request.
/// After the last response it discards the bytes that the client still sends: closing a socket with unread bytes would
/// reset the connection, and the client could lose the response.
class HttpServer::Loop {
 public:
  Loop(FileDescriptor listener, Options options)
      : options_(std::move(options)),
        listener_(std::move(listener)),
        waker_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        poller_(::epoll_create1(EPOLL_CLOEXEC)) {
    if (!waker_.is_open() || !poller_.is_open() || !watch(listener_.get(), kListener, EPOLLIN) ||
        !watch(waker_.get(), kWaker, EPOLLIN))
      throw SystemError(fmt::format("the dashboard cannot wait for connections: {}", std::strerror(errno)));
    thread_ = start_thread("the server of the dashboard", [this] { run(); });
  }

  ~Loop() {
    is_stopping_ = true;
    wake();
    thread_.join();
    workers_.stop();  // before the members that their functions use are destroyed
  }

 private:
  struct Connection {
    FileDescriptor socket{};
    Clock::time_point active{};  // when it was accepted, or the last response was begun or continued
    uint32_t events = EPOLLIN;
    std::string input{};   // not parsed yet
    size_t searched = 0;   // bytes of `input` without the end of a head
    std::string output{};  // of which `sent` bytes are sent
    size_t sent = 0;
    size_t discarded = 0;
    bool is_busy = false;     // a worker computes its response
    bool is_closing = false;  // its response is the last one
    bool is_discarding = false;
  };
  using Entry = std::map<uint64_t, Connection>::iterator;

  struct FinishedResponse {
    uint64_t connection = 0;
    std::string bytes{};  // empty: out of memory, even for an error
  };

  bool watch(int descriptor, uint64_t id, uint32_t events, int operation = EPOLL_CTL_ADD) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = id;
    return ::epoll_ctl(poller_.get(), operation, descriptor, &event) == 0;
  }

  void wake() {
    const uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(waker_.get(), &one, sizeof one);
  }

  void run() {
    std::array<epoll_event, 256> events;
    while (!is_stopping_) {
      const bool has_limits = !connections_.empty() || !acceptor_.is_accepting();
      const int count = ::epoll_wait(poller_.get(), events.data(), static_cast<int>(events.size()),
                                     has_limits ? static_cast<int>(kTick.count()) : -1);
      bool is_connecting = false;
      for (int i = 0; i < count; ++i) {
        is_connecting = is_connecting || events[i].data.u64 == kListener;
        handle(events[i]);
      }
      send_responses();
      if (is_connecting) accept_some();  // last: a request that has arrived keeps its connection
      close_overdue();
      acceptor_.resume(Clock::now());
    }
  }

  void handle(const epoll_event& event) {
    if (event.data.u64 == kWaker) {
      uint64_t count = 0;
      [[maybe_unused]] const auto got = ::read(waker_.get(), &count, sizeof count);
    }
    const auto entry = connections_.find(event.data.u64);
    if (entry == connections_.end()) return;
    if ((event.events & (EPOLLERR | EPOLLHUP)) != 0) return close(entry);
    if ((event.events & EPOLLIN) != 0) return receive(entry);
    if ((event.events & EPOLLOUT) != 0) send(entry);
  }

  void close(Entry entry) {
    strangers_.remove(entry->first);
    connections_.erase(entry);
  }

  // --- new connections

  void accept_some() {
    acceptor_.accept_some(
        Clock::now(), [this](FileDescriptor socket, const sockaddr_storage& from) { add(std::move(socket), from); },
        [this](int) { return close_one_stranger(); });
  }

  void add(FileDescriptor socket, const sockaddr_storage& from) {
    if (strangers_.size() >= options_.limits.strangers) close_one_stranger();
    const auto id = next_id_++;
    if (!watch(socket.get(), id, EPOLLIN)) return;
    const auto now = Clock::now();
    const auto entry = connections_.try_emplace(id).first;
    entry->second.socket = std::move(socket);
    entry->second.active = now;
    strangers_.add(id, address_of(from), now);
    receive(entry);  // at once: a flood of connections cannot displace a connection whose request has arrived
  }

  /// Returns false if there is no stranger.
  bool close_one_stranger() {
    if (strangers_.size() == 0) return false;
    close(connections_.find(strangers_.to_displace()));
    return true;
  }

  // The time limits start with the connection or the last response. Bytes that arrive later do not extend them.
  void close_overdue() {
    const auto now = Clock::now();
    const auto& limits = options_.limits;
    for (const auto id : strangers_.older_than(now - limits.stranger_time)) close(connections_.find(id));
    for (auto entry = connections_.begin(); entry != connections_.end();) {
      const auto current = entry++;
      const auto& connection = current->second;
      if (connection.is_busy || strangers_.contains(current->first)) continue;
      const auto limit = connection.is_discarding ? limits.stranger_time : limits.idle_time;
      if (now - connection.active > limit) close(current);
    }
  }

  // --- requests

  void receive(Entry entry) {
    auto& connection = entry->second;
    std::array<char, 16 << 10> bytes;
    const auto room = connection.is_discarding ? bytes.size() : options_.limits.head_bytes - connection.input.size();
    const auto got = ::recv(connection.socket.get(), bytes.data(), std::min(room, bytes.size()), 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) return close(entry);
    if (connection.is_discarding) {
      connection.discarded += static_cast<size_t>(got);
      if (connection.discarded > kMaxDiscarded) close(entry);
      return;
    }
    connection.input.append(bytes.data(), static_cast<size_t>(got));
    take_request(entry);
  }

  // RFC 9112, 2.2: clients may send an empty line after a body.
  static void skip_empty_lines(Connection& connection) {
    size_t blank = 0;
    while (connection.input.compare(blank, 2, "\r\n") == 0) blank += 2;
    if (blank == 0) return;
    connection.input.erase(0, blank);
    connection.searched = 0;
  }

  // Removes the next request from the input and starts it. No response is in progress.
  void take_request(Entry entry) {
    auto& connection = entry->second;
    skip_empty_lines(connection);
    const size_t size = head_size(connection.input, std::exchange(connection.searched, connection.input.size()));
    if (size == 0 && connection.input.size() < options_.limits.head_bytes) return set_events(entry, EPOLLIN);
    if (size == 0) return refuse(entry, plain_text(431, "The request is too long.\n"), false);
    const auto request = parse_request(std::string_view(connection.input).substr(0, size));
    connection.input.erase(0, size);
    connection.searched = 0;
    if (!request) return refuse(entry, plain_text(400, "The request is not valid.\n"), false);
    const bool is_head = request->method == "HEAD";
    if (const auto refusal = options_.authorize(*request)) return refuse(entry, *refusal, is_head);
    strangers_.remove(entry->first);
    connection.is_closing = !request->keeps_connection;
    connection.is_busy = true;
    set_events(entry, 0);
    const ResponseOptions options{.is_head = is_head, .closes = connection.is_closing};
    workers_.add([this, id = entry->first, request = *request, options] { respond(id, request, options); });
  }

  /// Sends the last response of a connection.
  void refuse(Entry entry, const HttpResponse& response, bool is_head) {
    entry->second.is_closing = true;
    begin_sending(entry, bytes_of(response, {.is_head = is_head, .closes = true}));
  }

  std::string bytes_of(HttpResponse response, const ResponseOptions& options) const {
    response.headers.insert(response.headers.begin(), options_.headers.begin(), options_.headers.end());
    return to_bytes(response, options);
  }

  /// Computes a response. Runs on a worker's thread.
  void respond(uint64_t id, const HttpRequest& request, const ResponseOptions& options) {
    FinishedResponse finished{.connection = id};
    try {
      finished.bytes = response_bytes(request, options);
    } catch (const std::exception&) {  // not even the memory for an error: the connection is closed
    }
    {
      const std::lock_guard lock(mutex_);
      finished_.push_back(std::move(finished));
    }
    wake();
  }

  std::string response_bytes(const HttpRequest& request, const ResponseOptions& options) const {
    std::string problem;
    try {
      return bytes_of(options_.handle(request), options);
    } catch (const std::exception& error) {
      problem = error.what();
    }
    return bytes_of(plain_text(500, problem + "\n"), options);
  }

  // --- responses

  void send_responses() {
    std::vector<FinishedResponse> responses;
    {
      const std::lock_guard lock(mutex_);
      responses.swap(finished_);
    }
    for (auto& response : responses) {
      const auto entry = connections_.find(response.connection);
      if (entry == connections_.end()) continue;  // the client has left
      entry->second.is_busy = false;
      if (response.bytes.empty())
        close(entry);
      else
        begin_sending(entry, std::move(response.bytes));
    }
  }

  void begin_sending(Entry entry, std::string bytes) {
    entry->second.output = std::move(bytes);
    entry->second.sent = 0;
    entry->second.active = Clock::now();
    send(entry);
  }

  void send(Entry entry) {
    auto& connection = entry->second;
    size_t sent = 0;
    while (connection.sent < connection.output.size()) {
      if (sent >= kSentInARow) return set_events(entry, EPOLLOUT);
      const auto put = ::send(connection.socket.get(), connection.output.data() + connection.sent,
                              std::min(connection.output.size() - connection.sent, kSentInARow - sent), MSG_NOSIGNAL);
      if (put < 0 && errno == EINTR) continue;
      if (put < 0 && errno == EAGAIN) return set_events(entry, EPOLLOUT);
      if (put < 0) return close(entry);
      connection.sent += static_cast<size_t>(put);
      sent += static_cast<size_t>(put);
      connection.active = Clock::now();
    }
    connection.output = {};
    if (!connection.is_closing) return take_request(entry);
    connection.is_discarding = true;
    connection.input = {};
    ::shutdown(connection.socket.get(), SHUT_WR);
    set_events(entry, EPOLLIN);
  }

  void set_events(Entry entry, uint32_t events) {
    if (std::exchange(entry->second.events, events) != events)
      watch(entry->second.socket.get(), entry->first, events, EPOLL_CTL_MOD);
  }

  const Options options_;
  const FileDescriptor listener_, waker_, poller_;
  std::atomic<bool> is_stopping_ = false;

  std::mutex mutex_;
  std::vector<FinishedResponse> finished_;  // guarded by mutex_

  // Used by the loop's thread only:
  std::map<uint64_t, Connection> connections_;  // the oldest first
  uint64_t next_id_ = 2;
  ConnectionAcceptor acceptor_{listener_.get(), poller_.get(), kListener};
  Strangers strangers_;  // some of connections_: they have not sent an allowed request

  WorkerThreads workers_{kWorkers, "responses of the dashboard"};
  std::thread thread_;
};

HttpServer::HttpServer(FileDescriptor listener, Options options)
    : loop_(std::make_unique<Loop>(std::move(listener), std::move(options))) {}

HttpServer::~HttpServer() = default;

}  // namespace lockstep::ui
