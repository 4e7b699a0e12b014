#pragma once

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "rendezvous/net/socket.h"
#include "support/stolen_time.h"

namespace lockstep {

/// Blocks until data, end of file or an error can be read. Returns false on time-out.
inline bool is_readable(const FileDescriptor& socket, std::chrono::milliseconds limit) {
  pollfd waiting{socket.get(), POLLIN, 0};
  return ::poll(&waiting, 1, static_cast<int>(limit.count())) == 1;
}

/// A client that connects to a loopback port and sends arbitrary bytes. It leaves with a reset, so that thousands of
/// them do not keep a port each for a minute (TIME_WAIT) and leave none for the tests beside this one.
class Stranger {
 public:
  explicit Stranger(int port)
      : socket_(connect_to({"127.0.0.1", port}, std::chrono::steady_clock::now() + std::chrono::seconds(20))) {
    reset_at_close();
  }
  /// Connects from the address 127.0.0.`host`.
  Stranger(int port, int host) : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in from{}, to{};
    from.sin_family = to.sin_family = AF_INET;
    from.sin_addr.s_addr = htonl(INADDR_LOOPBACK - 1 + static_cast<uint32_t>(host));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    to.sin_port = htons(static_cast<uint16_t>(port));
    if (::bind(socket_.get(), reinterpret_cast<sockaddr*>(&from), sizeof from) != 0 ||
        ::connect(socket_.get(), reinterpret_cast<sockaddr*>(&to), sizeof to) != 0)
      throw std::runtime_error("cannot connect from another loopback address");
    reset_at_close();
  }

  /// Returns false if the peer has closed the connection.
  bool say(std::string_view bytes) const {
    return ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) >= 0;
  }

  /// Whether the peer closes or resets the connection before the limit, stolen time aside. Data received until then is
  /// in heard().
  bool is_cut_off_within(std::chrono::milliseconds limit) {
    const Stopwatch watch;
    for (std::array<char, 4096> bytes;;) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(limit - watch.unstolen());
      if (left.count() < 0) return false;
      if (!is_readable(socket_, left)) {
        if (watch.unstolen() < limit) continue;
        return false;
      }
      const ssize_t got = ::recv(socket_.get(), bytes.data(), bytes.size(), 0);
      if (got <= 0) return true;
      heard_.append(bytes.data(), static_cast<size_t>(got));
    }
  }

  const std::string& heard() const { return heard_; }

 private:
  void reset_at_close() const {
    const linger at_once{1, 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  }

  FileDescriptor socket_;
  std::string heard_;
};

/// A server on a loopback port that handles one connection at a time with a given function.
class SideServer {
 public:
  explicit SideServer(std::function<void(const FileDescriptor&)> serve)
      : listener_(listen_at({"127.0.0.1", 0})), thread_([this, serve = std::move(serve)] {
          while (!should_end_) {
            if (!is_readable(listener_, std::chrono::milliseconds(10))) continue;
            const FileDescriptor socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
            ++accepted_;
            if (socket.is_open()) serve(socket);
          }
        }) {}
  ~SideServer() {
    should_end_ = true;
    thread_.join();
  }

  int port() const { return port_of(listener_); }
  int accepted() const { return accepted_; }

 private:
  const FileDescriptor listener_;
  std::atomic<bool> should_end_{false};
  std::atomic<int> accepted_{0};
  std::thread thread_;
};

/// Forwards one connection to a port, records the data sent to that port, and can cut the connection.
class Relay {
 public:
  explicit Relay(int port) : server_([this, port](const FileDescriptor& client) { carry(client, port); }) {}
  ~Relay() { cut(); }

  int port() const { return server_.port(); }
  /// Closes the connection at both ends without sending further data.
  void cut() { is_cut_ = true; }
  std::string said() const {
    std::lock_guard lock(mutex_);
    return said_;
  }

 private:
  void carry(const FileDescriptor& client, int port) {
    const auto server = connect_to({"127.0.0.1", port}, std::chrono::steady_clock::now() + std::chrono::seconds(20));
    while (!is_cut_) {
      std::array<pollfd, 2> ready{{{client.get(), POLLIN, 0}, {server.get(), POLLIN, 0}}};
      if (::poll(ready.data(), ready.size(), 10) <= 0) continue;
      if (ready[0].revents != 0 && !move(client, server, true)) return;
      if (ready[1].revents != 0 && !move(server, client, false)) return;
    }
  }

  bool move(const FileDescriptor& from, const FileDescriptor& to, bool is_to_server) {
    std::array<char, 64 << 10> bytes;
    const ssize_t got = ::recv(from.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got <= 0) return false;
    if (is_to_server) {
      std::lock_guard lock(mutex_);
      said_.append(bytes.data(), static_cast<size_t>(got));
    }
    return ::send(to.get(), bytes.data(), static_cast<size_t>(got), MSG_NOSIGNAL) == got;
  }

  std::atomic<bool> is_cut_{false};
  mutable std::mutex mutex_;
  std::string said_;  // guarded by mutex_
  SideServer server_;
};

}  // namespace lockstep
