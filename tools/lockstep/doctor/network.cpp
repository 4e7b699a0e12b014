#include "doctor/network.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <memory>

#include <fmt/format.h>

#include <lockstep/error.h>
#include <lockstep/rendezvous.h>

namespace lockstep::tool {
namespace {

constexpr const char* kMethod = "LOCKSTEP_INIT_METHOD";

std::string source_of_host(const Environment& job, const Environment::Lookup& lookup) {
  if (lookup(kMethod)) return kMethod;
  if (lookup("MASTER_ADDR")) return "MASTER_ADDR";
  return job.master_addr.empty() ? "" : job.source;
}

std::string source_of_port(int port, const Environment& job, const Environment::Lookup& lookup) {
  if (lookup(kMethod)) return kMethod;
  if (job.master_port != 0) return port == job.master_port ? "MASTER_PORT" : "derived from MASTER_PORT";
  return port == kDefaultPort ? "" : "derived from the job's name";
}

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

struct Socket {
  explicit Socket(int number) : number(number) {}
  ~Socket() {
    if (number >= 0) ::close(number);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  const int number;
};

std::string numeric(const sockaddr* address, socklen_t bytes) {
  char host[NI_MAXHOST] = {};
  if (::getnameinfo(address, bytes, host, sizeof host, nullptr, 0, NI_NUMERICHOST) != 0) return "";
  return host;
}

AddressList ask(const std::string& name, int port, int& error) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  error = ::getaddrinfo(name.c_str(), fmt::to_string(port).c_str(), &hints, &found);
  return {error == 0 ? found : nullptr, &::freeaddrinfo};
}

NameLookup look_up(const std::string& name, const AddressList& list, int error, std::chrono::milliseconds took) {
  NameLookup lookup{.name = name, .took = took};
  if (error != 0) lookup.failure = error == EAI_SYSTEM ? ::strerror(errno) : ::gai_strerror(error);
  for (const addrinfo* entry = list.get(); entry; entry = entry->ai_next) {
    const auto address = numeric(entry->ai_addr, entry->ai_addrlen);
    if (std::find(lookup.addresses.begin(), lookup.addresses.end(), address) == lookup.addresses.end())
      lookup.addresses.push_back(address);
  }
  return lookup;
}

struct Answer {
  AddressList list{nullptr, &::freeaddrinfo};
  NameLookup lookup{};
};

Answer resolve(const std::string& name, int port) {
  const auto start = std::chrono::steady_clock::now();
  int error = 0;
  Answer answer;
  answer.list = ask(name, port, error);
  const auto took = std::chrono::steady_clock::now() - start;
  answer.lookup = look_up(name, answer.list, error, std::chrono::duration_cast<std::chrono::milliseconds>(took));
  return answer;
}

std::vector<Interface> read_interfaces() {
  std::vector<Interface> interfaces;
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return interfaces;
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> list(first, &::freeifaddrs);
  for (const ifaddrs* entry = first; entry; entry = entry->ifa_next) {
    auto known = std::find_if(interfaces.begin(), interfaces.end(),
                              [&](const Interface& one) { return one.name == entry->ifa_name; });
    if (known == interfaces.end())
      known = interfaces.insert(interfaces.end(), {entry->ifa_name, (entry->ifa_flags & IFF_UP) != 0, {}});
    if (!entry->ifa_addr) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family == AF_INET) known->addresses.push_back(numeric(entry->ifa_addr, sizeof(sockaddr_in)));
    if (family == AF_INET6) known->addresses.push_back(numeric(entry->ifa_addr, sizeof(sockaddr_in6)));
  }
  return interfaces;
}

/// Connecting a UDP socket looks up the route without sending anything.
void find_route(const addrinfo* list, Network& network) {
  for (const addrinfo* entry = list; entry; entry = entry->ai_next) {
    const Socket probe(::socket(entry->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage local{};
    socklen_t bytes = sizeof local;
    if (probe.number >= 0 && ::connect(probe.number, entry->ai_addr, entry->ai_addrlen) == 0 &&
        ::getsockname(probe.number, reinterpret_cast<sockaddr*>(&local), &bytes) == 0) {
      network.local = numeric(reinterpret_cast<sockaddr*>(&local), bytes);
      network.route_failure.clear();
      return;
    }
    network.route_failure = ::strerror(errno);
  }
}

std::string try_to_listen(const addrinfo& address) {
  const Socket listener(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int yes = 1;  // as the store does, so that a port in TIME_WAIT counts as free
  if (listener.number >= 0 && ::setsockopt(listener.number, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) == 0 &&
      ::bind(listener.number, address.ai_addr, address.ai_addrlen) == 0 && ::listen(listener.number, 1) == 0)
    return "";
  return ::strerror(errno);
}

bool has(const std::vector<Interface>& interfaces, const std::string& address) {
  return is_loopback(address) || std::any_of(interfaces.begin(), interfaces.end(), [&](const Interface& one) {
           return std::find(one.addresses.begin(), one.addresses.end(), address) != one.addresses.end();
         });
}

/// The store would listen on the first address that belongs to this host.
void try_port(const addrinfo* list, Network& network) {
  for (const addrinfo* entry = list; entry; entry = entry->ai_next) {
    if (!has(network.interfaces, numeric(entry->ai_addr, entry->ai_addrlen))) continue;
    network.is_rendezvous_host = true;
    network.bind_failure = try_to_listen(*entry);
    return;
  }
}

}  // namespace

Rendezvous find_rendezvous(const Environment::Lookup& lookup) {
  Rendezvous rendezvous;
  try {
    rendezvous.job = Environment::detect(lookup);
    const auto place = find_rendezvous("env://", rendezvous.job, lookup);
    if (const auto* file = std::get_if<RendezvousFile>(&place)) {
      rendezvous.kind = Rendezvous::Kind::kFile;
      rendezvous.file = file->path;
      return rendezvous;
    }
    const auto& port = std::get<RendezvousPort>(place);
    rendezvous.host = port.endpoint.host;
    rendezvous.port = port.endpoint.port;
    rendezvous.port_is_served = !port.rank_zero_hosts;
  } catch (const Error& error) {
    rendezvous.kind = Rendezvous::Kind::kUnknown;
    rendezvous.refusal = error.what();
    return rendezvous;
  }
  rendezvous.host_source = source_of_host(rendezvous.job, lookup);
  rendezvous.port_source = source_of_port(rendezvous.port, rendezvous.job, lookup);
  return rendezvous;
}

bool spans_hosts(const Rendezvous& rendezvous) {
  return rendezvous.job.local_world_size < rendezvous.job.world_size;
}

Network read_network(const Rendezvous& rendezvous) {
  Network network;
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  network.host = resolve(name, 0).lookup;
  network.interfaces = read_interfaces();
  int first = 0, last = 0;
  if (std::ifstream("/proc/sys/net/ipv4/ip_local_port_range") >> first >> last) {
    network.first_ephemeral_port = first;
    network.last_ephemeral_port = last;
  }
  if (rendezvous.kind != Rendezvous::Kind::kAddress) return network;
  const auto answer = resolve(rendezvous.host, rendezvous.port);
  network.rendezvous = answer.lookup;
  find_route(answer.list.get(), network);
  try_port(answer.list.get(), network);
  return network;
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1" || address.starts_with("::ffff:127.");
}

bool is_loopback(const NameLookup& lookup) {
  return !lookup.addresses.empty() && std::all_of(lookup.addresses.begin(), lookup.addresses.end(),
                                                  [](const std::string& address) { return is_loopback(address); });
}

bool is_beyond_loopback(const Rendezvous& rendezvous, const Network& network) {
  return rendezvous.kind == Rendezvous::Kind::kAddress && !is_loopback(network.rendezvous);
}

}  // namespace lockstep::tool
