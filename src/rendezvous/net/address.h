#pragma once

#include <sys/socket.h>

#include <string>
#include <vector>

namespace lockstep {

/// A numeric address with its port, in the form of the socket API.
struct Address {
  sockaddr_storage storage{};
  socklen_t bytes = sizeof(sockaddr_storage);

  int family() const { return storage.ss_family; }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }

  int port() const;
  bool is_loopback() const;

  /// "192.0.2.1" or "2001:db8::1".
  std::string host() const;
};

/// The addresses of a name, in the order to try them, or the reason why the name does not resolve.
struct Resolution {
  std::vector<Address> addresses;
  std::string failure;
};

/// Resolves a name or address with getaddrinfo, which may query the network and block for seconds. An IPv6 address may
/// be in brackets. Throws SystemError if this process has no file descriptors or memory left.
Resolution resolve(const std::string& host, int port);

/// Returns the numeric address of a network interface of this host, IPv4 before IPv6; empty if it has none.
std::string address_of_interface(const std::string& name);

/// Returns "127.0.0.1", or "::1" on a host without IPv4.
const std::string& loopback_address();

/// Returns whether `host` is an IPv6 address without brackets.
bool is_ipv6(const std::string& host);

}  // namespace lockstep
