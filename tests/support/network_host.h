#pragma once

#include <unistd.h>

#include <cstdlib>
#include <string>

namespace lockstep {

inline bool run_quietly(const std::string& command) {
  return std::system((command + " 2>/dev/null").c_str()) == 0;
}

/// A network namespace with its loopback interface up, which acts as another host. Removed with the object. Needs root.
class NetworkHost {
 public:
  explicit NetworkHost(const std::string& role) : name_("lockstep" + std::to_string(::getpid()) + role) {
    is_made_ = run_quietly("ip netns add " + name_) && inside("ip link set lo up");
  }
  ~NetworkHost() { run_quietly("ip netns delete " + name_); }
  NetworkHost(const NetworkHost&) = delete;
  NetworkHost& operator=(const NetworkHost&) = delete;

  const std::string& name() const { return name_; }
  bool is_made() const { return is_made_; }
  bool inside(const std::string& command) const { return run_quietly("ip netns exec " + name_ + " " + command); }

 private:
  const std::string name_;
  bool is_made_ = false;
};

/// Connects two hosts by a veth pair; each end gets an address. Returns false on failure.
inline bool connect_hosts(const NetworkHost& a, const std::string& interface_a, const std::string& address_a,
                          const NetworkHost& b, const std::string& interface_b, const std::string& address_b) {
  auto set_up = [](const NetworkHost& host, const std::string& interface, const std::string& address) {
    std::string nodad = address.find(':') != std::string::npos ? " nodad" : "";
    return host.inside("ip address add " + address + " dev " + interface + nodad) &&
           host.inside("ip link set " + interface + " up");
  };
  return run_quietly("ip link add " + interface_a + " netns " + a.name() + " type veth peer name " + interface_b +
                     " netns " + b.name()) &&
         set_up(a, interface_a, address_a) && set_up(b, interface_b, address_b);
}

}  // namespace lockstep
