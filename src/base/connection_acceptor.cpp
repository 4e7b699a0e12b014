#include "base/connection_acceptor.h"

#include <poll.h>
#include <sys/epoll.h>

#include <string_view>

namespace lockstep {

// accept4() allocates a descriptor first, so it can fail with EMFILE although no client is waiting.
bool ConnectionAcceptor::is_client_waiting() const {
  pollfd waiting{listener_, POLLIN, 0};
  return ::poll(&waiting, 1, 0) > 0;
}

/// Returns a closed descriptor, with errno set, on failure.
FileDescriptor ConnectionAcceptor::accept(sockaddr_storage& from) const {
  socklen_t size = sizeof from;
  return FileDescriptor(::accept4(listener_, reinterpret_cast<sockaddr*>(&from), &size, SOCK_CLOEXEC | SOCK_NONBLOCK));
}

// Without the pause, the loop would spin: the listener stays readable.
void ConnectionAcceptor::pause_until(Clock::time_point time) {
  accept_again_ = time;
  set_accepting(false);
}

void ConnectionAcceptor::resume(Clock::time_point now) {
  if (!is_accepting_ && now >= accept_again_) set_accepting(true);
}

void ConnectionAcceptor::set_accepting(bool is_accepting) {
  is_accepting_ = is_accepting;
  epoll_event event{};
  event.events = is_accepting ? EPOLLIN : 0u;
  event.data.u64 = data_;
  ::epoll_ctl(poller_, EPOLL_CTL_MOD, listener_, &event);
}

uint64_t Strangers::to_displace() const {
  std::map<std::string_view, size_t> by_address;
  for (const auto& [number, stranger] : strangers_) ++by_address[stranger.address];
  auto worst = strangers_.begin();
  for (auto one = strangers_.begin(); one != strangers_.end(); ++one)  // the oldest first
    if (by_address[one->second.address] > by_address[worst->second.address]) worst = one;
  return worst->first;
}

std::vector<uint64_t> Strangers::older_than(Clock::time_point time) const {
  std::vector<uint64_t> older;
  for (const auto& [number, stranger] : strangers_)
    if (stranger.since < time) older.push_back(number);
  return older;
}

}  // namespace lockstep
