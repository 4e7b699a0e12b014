#pragma once

#include <sys/socket.h>

#include <string>
#include <vector>

namespace lockstep {

/// A numeric address with its port, as the system's calls take it.
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

/// The addresses of a name in the order in which to try them, or the reason why there are none.
struct Resolution {
  std::vector<Address> addresses;
  std::string failure;
};

/// Asks the system, which may ask the network and take seconds. An IPv6 address may stand in brackets.
/// SystemError when this process is out of files or memory.
Resolution resolve(const std::string& host, int port);

/// The numeric address of a network interface of this host, IPv4 before IPv6; empty when there is none.
std::string address_of_interface(const std::string& name);

/// Whether this is an IPv6 address, without brackets.
bool is_ipv6(const std::string& host);

}  // namespace lockstep
