#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <list>
#include <string>
#include <thread>

#include "rendezvous/net/socket.h"

namespace lockstep {

/// Emulates a slow network on loopback: forwards connections on its port to the target port and delays each byte by
/// `delay` in both directions; forwards at most `rate` bytes per second in each. Runs a thread during its lifetime.
class SlowRelay {
 public:
  SlowRelay(int target, std::chrono::milliseconds delay, double rate = 1e12)
      : target_(target), delay_(delay), rate_(rate), listener_(listen_at({"127.0.0.1", 0})), thread_([this] {
          run();
        }) {}
  ~SlowRelay() {
    should_stop_ = true;
    thread_.join();
  }
  SlowRelay(const SlowRelay&) = delete;
  SlowRelay& operator=(const SlowRelay&) = delete;

  int port() const { return port_of(listener_); }

 private:
  using Clock = std::chrono::steady_clock;

  struct Direction {
    int from, to;
    std::deque<std::pair<Clock::time_point, std::string>>
        under_way{};  // time of arrival, data; empty data: end of file
    bool has_ended = false;
    Clock::time_point again{};  // when more bytes may be taken
  };
  struct Connection {
    FileDescriptor near, far;
    Direction there{near.get(), far.get()}, back{far.get(), near.get()};
  };

  void run() {
    while (!should_stop_) {
      std::vector<pollfd> files{{listener_.get(), POLLIN, 0}};
      for (auto& connection : connections_)
        for (auto* way : {&connection.there, &connection.back})
          files.push_back({way->has_ended || Clock::now() < way->again ? -1 : way->from, POLLIN, 0});
      ::poll(files.data(), files.size(), 1);
      size_t index = 1;
      for (auto& connection : connections_)
        for (auto* way : {&connection.there, &connection.back}) {
          if (files[index++].revents != 0) take(*way);
          deliver(*way);
        }
      if (files[0].revents == 0) continue;
      FileDescriptor near(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      auto far = connect_to({"127.0.0.1", target_}, Clock::now() + std::chrono::seconds(20));
      if (near.is_open()) connections_.push_back({std::move(near), std::move(far)});
    }
  }

  void take(Direction& way) const {
    char bytes[4096];
    const auto got = ::recv(way.from, bytes, sizeof bytes, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN) return;
    way.again = Clock::now() + std::chrono::nanoseconds(static_cast<int64_t>(static_cast<double>(got) / rate_ * 1e9));
    way.has_ended = got <= 0;
    way.under_way.emplace_back(Clock::now() + delay_, std::string(bytes, static_cast<size_t>(got > 0 ? got : 0)));
  }

  static void deliver(Direction& way) {
    for (; !way.under_way.empty() && way.under_way.front().first <= Clock::now(); way.under_way.pop_front()) {
      const auto& bytes = way.under_way.front().second;
      if (bytes.empty())
        ::shutdown(way.to, SHUT_WR);
      else  // few bytes, so they fit in the socket's buffer
          [[maybe_unused]]
        auto sent = ::send(way.to, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    }
  }

  const int target_;
  const std::chrono::milliseconds delay_;
  const double rate_;
  const FileDescriptor listener_;
  std::atomic<bool> should_stop_ = false;
  std::list<Connection> connections_;  // used by the thread only
  std::thread thread_;
};

}  // namespace lockstep
