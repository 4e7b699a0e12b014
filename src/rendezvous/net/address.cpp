#include "rendezvous/net/address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include <lockstep/error.h>

#include "base/file_descriptor.h"
#include "base/text.h"

namespace lockstep {
namespace {

template <class Kind>
Kind as(const Address& address) {
  Kind kind;
  std::memcpy(&kind, &address.storage, sizeof kind);
  return kind;
}

std::string without_brackets(const std::string& host) {
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  return bracketed ? host.substr(1, host.size() - 2) : host;
}

bool out_of_resources(int failure, int error) {
  return failure == EAI_MEMORY || (failure == EAI_SYSTEM && (error == EMFILE || error == ENFILE || error == ENOMEM));
}

}  // namespace

int Address::port() const {
  return ntohs(family() == AF_INET6 ? as<sockaddr_in6>(*this).sin6_port : as<sockaddr_in>(*this).sin_port);
}

bool Address::is_loopback() const {
  constexpr uint8_t kNet = 127;
  if (family() == AF_INET) return ntohl(as<sockaddr_in>(*this).sin_addr.s_addr) >> 24 == kNet;
  if (family() != AF_INET6) return false;
  const in6_addr address = as<sockaddr_in6>(*this).sin6_addr;
  if (IN6_IS_ADDR_V4MAPPED(&address)) return address.s6_addr[12] == kNet;
  return IN6_IS_ADDR_LOOPBACK(&address);
}

std::string Address::host() const {
  char name[NI_MAXHOST] = "";
  const int failure = ::getnameinfo(get(), bytes, name, sizeof name, nullptr, 0, NI_NUMERICHOST);
  if (failure != 0) throw SystemError(text("getnameinfo of a socket's address: ", ::gai_strerror(failure)));
  return name;
}

Resolution resolve(const std::string& host, int port) {
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  wanted.ai_flags = AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int failure = ::getaddrinfo(without_brackets(host).c_str(), std::to_string(port).c_str(), &wanted, &list);
  const int error = errno;
  if (failure != 0) {
    const std::string reason =
        text("the name does not resolve: ", failure == EAI_SYSTEM ? std::strerror(error) : ::gai_strerror(failure));
    if (out_of_resources(failure, error)) throw SystemError(text("getaddrinfo of \"", host, "\": ", reason));
    return {{}, reason};
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(list, &::freeaddrinfo);
  Resolution found;
  for (; list != nullptr; list = list->ai_next) {
    Address address;
    std::memcpy(&address.storage, list->ai_addr, list->ai_addrlen);
    address.bytes = list->ai_addrlen;
    found.addresses.push_back(address);
  }
  return found;
}

std::string address_of_interface(const std::string& name) {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) throw SystemError(text("getifaddrs: ", std::strerror(errno)));
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(first, &::freeifaddrs);
  for (const auto& [family, bytes] : {std::pair{AF_INET, sizeof(sockaddr_in)}, {AF_INET6, sizeof(sockaddr_in6)}})
    for (const ifaddrs* entry = first; entry; entry = entry->ifa_next) {
      if (!entry->ifa_addr || entry->ifa_addr->sa_family != family || name != entry->ifa_name) continue;
      Address address;
      std::memcpy(&address.storage, entry->ifa_addr, bytes);
      address.bytes = static_cast<socklen_t>(bytes);
      return address.host();
    }
  return "";
}

bool is_ipv6(const std::string& host) {
  in6_addr address;
  const std::string without_scope = host.substr(0, host.find('%'));  // "fe80::7%eth0"
  return ::inet_pton(AF_INET6, without_scope.c_str(), &address) == 1;
}

const std::string& loopback_address() {
  static const std::string address = [] {
    const FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in loopback{};
    loopback.sin_family = AF_INET;
    loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const bool has_ipv4 =
        socket.is_open() && ::bind(socket.get(), reinterpret_cast<sockaddr*>(&loopback), sizeof loopback) == 0;
    return has_ipv4 ? "127.0.0.1" : "::1";
  }();
  return address;
}

}  // namespace lockstep
