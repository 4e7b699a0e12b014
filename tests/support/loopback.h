#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "rendezvous/net/socket.h"

namespace lockstep {

/// Waits until bytes, the end, or an error can be read.
inline bool is_readable(const FileDescriptor& socket, std::chrono::milliseconds limit) {
  pollfd waiting{socket.get(), POLLIN, 0};
  return ::poll(&waiting, 1, static_cast<int>(limit.count())) == 1;
}

/// One who connects to a port of loopback and says what it likes.
class Stranger {
 public:
  explicit Stranger(int port)
      : socket_(connect_to({"127.0.0.1", port}, std::chrono::steady_clock::now() + std::chrono::seconds(20))) {}

  /// False when the other side is gone.
  bool say(std::string_view bytes) const {
    return ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) >= 0;
  }

  /// Whether the other side ends the connection, in order or not, before the limit; what it said is in heard().
  bool is_cut_off_within(std::chrono::milliseconds limit) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    for (std::array<char, 4096> bytes;;) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
      if (left.count() < 0 || !is_readable(socket_, left)) return false;
      const ssize_t got = ::recv(socket_.get(), bytes.data(), bytes.size(), 0);
      if (got <= 0) return true;
      heard_.append(bytes.data(), static_cast<size_t>(got));
    }
  }

  const std::string& heard() const { return heard_; }

 private:
  FileDescriptor socket_;
  std::string heard_;
};

/// Something else that listens on a port of loopback, and does what it does with one connection at a time.
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

/// Carries one connection to a port, remembers what was said on the way there, and can be cut.
class Relay {
 public:
  explicit Relay(int port) : server_([this, port](const FileDescriptor& client) { carry(client, port); }) {}
  ~Relay() { cut(); }

  int port() const { return server_.port(); }
  /// Both ends see their connection end, without another word.
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
