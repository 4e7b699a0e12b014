#pragma once

#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"

// Common to the store and the dashboard, whose clients may be hostile. A stranger is a connection that has not
// authenticated yet.

namespace lockstep {

/// Accepts the connections of a listening socket for an event loop. Used by the thread of the loop only.
class ConnectionAcceptor {
 public:
  using Clock = std::chrono::steady_clock;

  /// The nonblocking listener is registered at the epoll instance, with this data. Both outlive the object.
  ConnectionAcceptor(int listener, int poller, uint64_t data) : listener_(listener), poller_(poller), data_(data) {}

  /// Accepts waiting connections, at most 16, so that the loop handles other events, too. Calls
  /// `add(FileDescriptor socket, const sockaddr_storage& from)` for each. When no descriptors are left, calls
  /// `make_room(int error)`, which closes a connection or returns false. Then no connection is accepted for a second.
  template <class Add, class MakeRoom>
  void accept_some(Clock::time_point now, const Add& add, const MakeRoom& make_room) {
    for (int turn = 0; turn < kAcceptsInARow && is_accepting_ && is_client_waiting(); ++turn) {
      sockaddr_storage from{};
      FileDescriptor socket = accept(from);
      const int error = errno;
      if (socket.is_open())
        add(std::move(socket), from);
      else if (is_exhaustion(error) && !make_room(error))
        pause_until(now + kPause);
    }
  }

  /// Ends a pause that is over. Call it in each iteration of the loop.
  void resume(Clock::time_point now);
  /// Accepts no further connection.
  void stop() { pause_until(Clock::time_point::max()); }
  bool is_accepting() const { return is_accepting_; }

 private:
  static constexpr int kAcceptsInARow = 16;
  static constexpr std::chrono::seconds kPause{1};

  static bool is_exhaustion(int error) {
    return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
  }
  bool is_client_waiting() const;
  FileDescriptor accept(sockaddr_storage& from) const;
  void pause_until(Clock::time_point time);
  void set_accepting(bool is_accepting);

  const int listener_, poller_;
  const uint64_t data_;
  bool is_accepting_ = true;
  Clock::time_point accept_again_{};
};

/// The strangers of a server. Their numbers increase, so the lowest one is the oldest.
class Strangers {
 public:
  using Clock = std::chrono::steady_clock;

  void add(uint64_t number, std::string address, Clock::time_point since) {
    strangers_[number] = {std::move(address), since};
  }
  /// For a connection that has authenticated or is closed. Does nothing if the number is not that of a stranger.
  void remove(uint64_t number) { strangers_.erase(number); }

  bool contains(uint64_t number) const { return strangers_.contains(number); }
  size_t size() const { return strangers_.size(); }

  /// The oldest stranger of the address that has the most strangers. The server closes it to make room, so a flood from
  /// one host does not displace strangers of other hosts. There must be a stranger.
  uint64_t to_displace() const;
  /// The strangers that connected before `time`.
  std::vector<uint64_t> older_than(Clock::time_point time) const;

 private:
  struct Stranger {
    std::string address{};
    Clock::time_point since{};
  };
  std::map<uint64_t, Stranger> strangers_;
};

}  // namespace lockstep
