#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <lockstep/environment.h>

namespace lockstep::tool {

/// The rendezvous that a job started from this environment would use.
struct Rendezvous {
  enum class Kind { kAddress, kFile, kUnknown };

  Kind kind = Kind::kAddress;
  std::string host{"127.0.0.1"};  // kAddress only: a name or an address, without brackets
  std::string host_source{};      // the variable or launcher that set the host; empty: the default
  int port = 0;                   // kAddress only
  std::string port_source{};      // the variable, or how the port was derived; empty: the default
  bool port_is_served = false;    // the launcher listens on the port, not rank 0
  std::string file{};             // kFile only
  Environment job{};              // rank 0 of 1 if the variables are inconsistent
  std::string refusal{};          // kUnknown only: the error in the variables
};

/// Determines the rendezvous from the variables alone. Pure. Never throws: variables that init_process_group would
/// refuse give kUnknown.
Rendezvous find_rendezvous(const Environment::Lookup& lookup);

/// Whether the job has ranks on other hosts, according to the variables.
bool spans_hosts(const Rendezvous& rendezvous);

/// The result of resolving a name.
struct NameLookup {
  std::string name{};
  std::vector<std::string> addresses{};  // numeric
  std::string failure{};                 // why there are no addresses
  std::chrono::milliseconds took{};
};

/// A network interface, such as "eth0".
struct Interface {
  std::string name{};
  bool is_up = false;
  std::vector<std::string> addresses{};
};

/// This host's network and the route to the rendezvous; input of the checks.
struct Network {
  NameLookup host{};            // this host's own name
  NameLookup rendezvous{};      // the rendezvous host; no addresses for a rendezvous file
  std::string local{};          // this host's address on the route to the rendezvous; empty if there is no route
  std::string route_failure{};  // why there is no route
  std::vector<Interface> interfaces{};
  bool is_rendezvous_host = false;   // the rendezvous address belongs to this host
  std::string bind_failure{};        // why listening on the port failed; empty if it worked or was not tried
  int first_ephemeral_port = 32768;  // first port that the system assigns to clients
  int last_ephemeral_port = 60999;   // last such port
};

/// Resolves names, which may use the network and take seconds. Briefly listens on the rendezvous port if its address
/// belongs to this host. Sends nothing.
Network read_network(const Rendezvous& rendezvous);

/// Whether a numeric address is a loopback address.
bool is_loopback(const std::string& address);

/// Whether the name resolved to loopback addresses only. False if it has no addresses.
bool is_loopback(const NameLookup& lookup);

/// Whether the rendezvous address is not a loopback address. True also for a name that does not resolve.
bool is_beyond_loopback(const Rendezvous& rendezvous, const Network& network);

}  // namespace lockstep::tool
