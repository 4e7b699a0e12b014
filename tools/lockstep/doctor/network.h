#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <lockstep/environment.h>

namespace lockstep::tool {

/// Where the ranks of a job that is started from this environment would meet.
struct Rendezvous {
  enum class Kind { kAddress, kFile, kUnknown };

  Kind kind = Kind::kAddress;
  std::string host{"127.0.0.1"};  // of kAddress: a name or an address, without brackets
  std::string host_source{};      // the variable or launcher that gave it; empty: nothing did
  int port = 0;                   // of kAddress
  std::string port_source{};      // the variable, or what it is derived from; empty: nothing gave it
  bool port_is_served = false;    // the launcher that set the variables listens on the port itself
  std::string file{};             // of kFile
  Environment job{};              // rank 0 of 1 where the variables make no sense
  std::string refusal{};          // of kUnknown: what is wrong with the variables
};

/// Pure: reads only what `lookup` answers. Never throws: what joining would refuse is kUnknown.
Rendezvous find_rendezvous(const Environment::Lookup& lookup);

/// Whether ranks run on other hosts too, as far as the variables tell.
bool spans_hosts(const Rendezvous& rendezvous);

/// What the system answers about a name.
struct NameLookup {
  std::string name{};
  std::vector<std::string> addresses{};  // numeric
  std::string failure{};                 // why there are none
  std::chrono::milliseconds took{};
};

/// An interface that has an address, "eth0" say.
struct Interface {
  std::string name{};
  bool is_up = false;
  std::vector<std::string> addresses{};
};

/// Facts about this host's network and the way to where the ranks meet.
struct Network {
  NameLookup host{};            // this host's own name
  NameLookup rendezvous{};      // where the ranks meet; no addresses when they meet in a file
  std::string local{};          // this host's address on the way there; empty when there is no way
  std::string route_failure{};  // why
  std::vector<Interface> interfaces{};
  bool is_rendezvous_host = false;   // the address of the meeting is this host's
  std::string bind_failure{};        // why the port cannot be listened on here; empty when it can, or is another host's
  int first_ephemeral_port = 32768;  // the system gives those from here ...
  int last_ephemeral_port = 60999;   // ... to here to programs that ask for any
};

/// Resolves names, which may ask the network and take seconds. Listens on the meeting's port for a moment, when that is
/// this host's. Sends nothing.
Network read_network(const Rendezvous& rendezvous);

/// Of a numeric address: whether no other host reaches it.
bool is_loopback(const std::string& address);

/// Whether all that the name means is this host alone. Of a name without addresses: no.
bool is_loopback(const NameLookup& lookup);

/// Whether ranks meet at an address that other hosts reach, or a name that means none here.
bool is_beyond_loopback(const Rendezvous& rendezvous, const Network& network);

}  // namespace lockstep::tool
