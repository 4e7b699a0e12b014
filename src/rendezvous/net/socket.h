#pragma once

#include <chrono>
#include <functional>
#include <string>

#include <lockstep/meeting_place.h>

#include "base/file_descriptor.h"
#include "rendezvous/net/address.h"

namespace lockstep {

/// Reads "host:port", "192.0.2.1:port" or "[2001:db8::1]:port" with a port from 1 to 65535; UsageError, quoting the
/// text, for anything else.
Endpoint parse_endpoint(const std::string& text);

/// As parse_endpoint reads it: an IPv6 address stands in brackets.
std::string to_string(const Endpoint& endpoint);

/// Whether the name or address means this host and no other can reach it. A name that does not resolve does not.
bool is_loopback(const std::string& host);

/// A socket that listens at this address and no other; port 0 lets the system choose. Nonblocking, and what it accepts
/// has no delays for small messages. Of a name's several addresses, the first that this host has.
/// SystemError when it cannot: for a port in use, naming the process that has it where that can be seen. `remedy` is
/// for an endpoint that MASTER_ADDR does not name.
FileDescriptor listen_at(const Endpoint& endpoint, const char* remedy = nullptr);

/// The socket's own port.
int port_of(const FileDescriptor& socket);

/// Between two attempts to connect: each pause is twice as long as the one before.
constexpr std::chrono::milliseconds kFirstPause(5);
constexpr std::chrono::milliseconds kLongestPause(100);

/// What is called about every 100 ms by something that waits; it may throw, which ends the wait.
using OnWait = std::function<void()>;
constexpr std::chrono::milliseconds kBetweenCalls(100);

/// A connected nonblocking socket without delays for small messages. While nobody listens there it tries again, and
/// throws TimeoutError naming the endpoint and the last reason when nobody has by the deadline; a name that does not
/// resolve yet counts as nobody. Tries once at least. The system may take seconds past the deadline to resolve a name.
FileDescriptor connect_to(const Endpoint& endpoint, std::chrono::steady_clock::time_point deadline,
                          const OnWait& on_wait = {});

/// One attempt, for loops that wait for other things too. The socket is connected when `error` is 0. When `error` is
/// EINPROGRESS, connection_error says how the attempt ended once the socket is writable.
FileDescriptor begin_connecting(const Address& address, int& error);
/// 0 when the connection to the address is made.
int connection_error(const FileDescriptor& socket, const Address& address);

/// This end's numeric address: the one that reaches the other end.
std::string local_address(const FileDescriptor& socket);

/// The other end, for people: "192.0.2.1:4711", or "a peer that is gone".
std::string peer_of(const FileDescriptor& socket);

}  // namespace lockstep
