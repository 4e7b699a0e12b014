#include "ui/listener.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include <fmt/format.h>

#include <lockstep/error.h>

namespace lockstep::ui {
namespace {

bool set_option(const FileDescriptor& socket, int level, int name, int value) {
  return ::setsockopt(socket.get(), level, name, &value, sizeof value) == 0;
}

/// Returns a closed descriptor, with errno set, on failure.
FileDescriptor listen_on(const addrinfo& address) {
  FileDescriptor socket(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const bool listens = socket.is_open() && set_option(socket, SOL_SOCKET, SO_REUSEADDR, 1) &&  // for a quick restart
                       set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1) &&  // accepted sockets inherit it
                       (address.ai_family != AF_INET6 || set_option(socket, IPPROTO_IPV6, IPV6_V6ONLY, 0)) &&
                       ::bind(socket.get(), address.ai_addr, address.ai_addrlen) == 0 &&
                       ::listen(socket.get(), SOMAXCONN) == 0;
  return listens ? std::move(socket) : FileDescriptor();
}

}  // namespace

FileDescriptor listen_on(const std::string& address, int port) {
  addrinfo wanted{}, *found = nullptr;
  wanted.ai_family = AF_UNSPEC;
  wanted.ai_socktype = SOCK_STREAM;
  wanted.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  const int failure = ::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &wanted, &found);
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, [](addrinfo* list) {
    if (list != nullptr) ::freeaddrinfo(list);
  });
  for (const auto* one = found; one != nullptr; one = one->ai_next) {
    if (auto socket = listen_on(*one); socket.is_open()) return socket;
    if (errno == EADDRINUSE) break;  // a browser that uses the name could send the token to the other process
  }
  throw SystemError(fmt::format("cannot listen on {} port {}: {}. Choose another --port or --address.", address, port,
                                failure == 0 ? std::strerror(errno) : ::gai_strerror(failure)));
}

int port_of(const FileDescriptor& listener) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0)
    throw SystemError(fmt::format("getsockname: {}", std::strerror(errno)));
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

}  // namespace lockstep::ui
