#include "doctor/checks.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace lockstep::tool {
namespace {

constexpr std::chrono::milliseconds kSlow{1000};

/// "node7 (10.0.0.7)"; an address is returned unchanged.
std::string describe(const NameLookup& lookup) {
  if (lookup.addresses.size() == 1 && lookup.addresses[0] == lookup.name) return lookup.name;
  return fmt::format("{} ({})", lookup.name, fmt::join(lookup.addresses, ", "));
}

std::string describe_slow_lookup(const NameLookup& lookup) {
  return fmt::format("{} took {:.1f} s to resolve", lookup.name, static_cast<double>(lookup.took.count()) / 1000);
}

std::string source_of(const Rendezvous& rendezvous) {
  return rendezvous.host_source.empty() ? "the default" : rendezvous.host_source;
}

/// Names and addresses that mean loopback on every host.
bool names_loopback(const std::string& name) {
  return is_loopback(name) || name == "localhost" || name.ends_with(".localhost") || name == "ip6-localhost";
}

std::string interface_of(const Network& network, const std::string& address) {
  for (const auto& one : network.interfaces)
    if (std::find(one.addresses.begin(), one.addresses.end(), address) != one.addresses.end()) return one.name;
  return is_loopback(address) ? "lo" : "an unknown interface";
}

/// Bridges that reach only this host's containers and virtual machines.
bool is_container_bridge(const std::string& name) {
  return name.starts_with("docker") || name.starts_with("virbr") || name.starts_with("veth") || name.starts_with("br-");
}

Finding check_named_interface(const Rendezvous& rendezvous, const Network& network, const std::string& name) {
  Finding finding{"interface", Status::kError, "",
                  "set LOCKSTEP_INTERFACE to an interface that the other hosts can reach"};
  const auto found = std::find_if(network.interfaces.begin(), network.interfaces.end(),
                                  [&](const Interface& one) { return one.name == name; });
  if (found == network.interfaces.end()) {
    std::vector<std::string> names;
    for (const auto& one : network.interfaces) names.push_back(one.name);
    finding.found = fmt::format("LOCKSTEP_INTERFACE is \"{}\"; this host has {}", name, fmt::join(names, ", "));
  } else if (!found->is_up || found->addresses.empty()) {
    finding.found =
        fmt::format("LOCKSTEP_INTERFACE is {}, which {}", name, found->is_up ? "has no address" : "is down");
    finding.remedy = fmt::format("ip link set {} up and give it an address, or {}", name, finding.remedy);
  } else if (is_loopback({.addresses = found->addresses}) &&
             (spans_hosts(rendezvous) || is_beyond_loopback(rendezvous, network))) {
    finding.found = fmt::format("LOCKSTEP_INTERFACE is {}, which no other host can reach", name);
  } else {
    return {"interface", Status::kOk,
            fmt::format("{} ({}), selected by LOCKSTEP_INTERFACE", name, found->addresses[0])};
  }
  return finding;
}

}  // namespace

Finding check_host_name(const Rendezvous& rendezvous, const Network& network) {
  const auto& host = network.host;
  Finding finding{"host name", Status::kWarning, "", ""};
  if (host.addresses.empty()) {
    finding.found = fmt::format("{} does not resolve: {}", host.name, host.failure);
    finding.remedy = fmt::format("add {} with its address to /etc/hosts or to DNS", host.name);
  } else if (is_loopback(host) && is_beyond_loopback(rendezvous, network)) {
    finding.found =
        fmt::format("{}: programs that look up their own host name, such as MPI's, give other hosts a loopback address",
                    describe(host));
    finding.remedy = fmt::format("put this line into /etc/hosts: {} {}",
                                 network.local.empty() ? "ADDRESS" : network.local, host.name);
  } else if (host.took > kSlow) {
    finding.found = describe_slow_lookup(host);
    finding.remedy = fmt::format("add {} to /etc/hosts, or fix the name servers in /etc/resolv.conf", host.name);
  } else {
    finding.status = Status::kOk;
    finding.found = describe(host);
  }
  return finding;
}

Finding check_rendezvous_address(const Rendezvous& rendezvous, const Network& network) {
  const auto& place = network.rendezvous;
  const std::string source = source_of(rendezvous);
  Finding finding{"meeting address", Status::kError, "", ""};
  if (place.addresses.empty()) {
    finding.found = fmt::format("{} is {}, which does not resolve: {}", source, place.name, place.failure);
    finding.remedy = fmt::format("set MASTER_ADDR to an address, or add {} to /etc/hosts on every host", place.name);
  } else if (is_loopback(place) && (spans_hosts(rendezvous) || !names_loopback(place.name))) {
    finding.status = spans_hosts(rendezvous) ? Status::kError : Status::kWarning;
    finding.found = fmt::format("{} is {}, which other hosts cannot reach", source, describe(place));
    finding.remedy = "set MASTER_ADDR to an address of rank 0's host that the other hosts can reach, or fix /etc/hosts";
  } else if (network.local.empty()) {
    finding.found =
        fmt::format("{} is {}, but there is no route to it: {}", source, describe(place), network.route_failure);
    finding.remedy =
        fmt::format("see `ip route get {}`; check MASTER_ADDR, and that the interface is up", place.addresses[0]);
  } else if (place.took > kSlow) {
    finding.status = Status::kWarning;
    finding.found = describe_slow_lookup(place);
    finding.remedy = fmt::format("set MASTER_ADDR to an address, or add {} to /etc/hosts", place.name);
  } else {
    finding.status = Status::kOk;
    if (is_loopback(place))
      finding.found = fmt::format("{}: all ranks are on this host", describe(place));
    else if (network.is_rendezvous_host)
      finding.found = fmt::format("{}, which is this host", describe(place));
    else
      finding.found = fmt::format("{}, reached from {}", describe(place), network.local);
  }
  return finding;
}

Finding check_interface(const Rendezvous& rendezvous, const Network& network, const std::optional<std::string>& named) {
  if (named && !named->empty()) return check_named_interface(rendezvous, network, *named);
  const std::string name = interface_of(network, network.local);
  const std::string found = fmt::format("{} ({})", name, network.local);
  if (is_beyond_loopback(rendezvous, network) && is_container_bridge(name))
    return {"interface", Status::kWarning, found + ", a bridge to containers of this host",
            "set LOCKSTEP_INTERFACE and MASTER_ADDR to a network that the other hosts can reach"};
  return {"interface", Status::kOk, found};
}

Finding check_port(const Rendezvous& rendezvous, const Network& network) {
  const int port = rendezvous.port;
  if (rendezvous.port_is_served) return {"port", Status::kOk, fmt::format("{}, where the launcher listens", port)};
  if (!network.bind_failure.empty() && rendezvous.job.rank > 0)
    return {"port", Status::kOk, fmt::format("{}, in use: rank 0 listens there", port)};
  if (!network.bind_failure.empty()) {
    const bool is_chosen = !rendezvous.port_source.empty();
    const std::string other =
        fmt::format("set MASTER_PORT to another port from 1024 to {}", network.first_ephemeral_port - 1);
    return {"port", is_chosen ? Status::kError : Status::kWarning,
            fmt::format("cannot listen on {} ({}): {}", port, is_chosen ? rendezvous.port_source : "the default",
                        network.bind_failure),
            port < 1024 ? other
                        : fmt::format("`ss -ltnp 'sport = :{}'` shows the process that uses it; or {}", port, other)};
  }
  if (port >= network.first_ephemeral_port && port <= network.last_ephemeral_port)
    return {"port", Status::kWarning,
            fmt::format("{} is in the ephemeral range, {} to {}, which the system assigns to any program", port,
                        network.first_ephemeral_port, network.last_ephemeral_port),
            fmt::format("set MASTER_PORT to a port from 1024 to {}", network.first_ephemeral_port - 1)};
  if (!network.is_rendezvous_host)
    return {"port", Status::kOk, fmt::format("{} on another host", port), "run lockstep doctor on that host too"};
  const bool is_derived = rendezvous.port_source.starts_with("derived");
  return {"port", Status::kOk, fmt::format("{}{}, free", port, is_derived ? ", " + rendezvous.port_source : "")};
}

}  // namespace lockstep::tool
