#pragma once

#include <chrono>
#include <functional>
#include <string>

#include <lockstep/rendezvous.h>

#include "base/file_descriptor.h"
#include "rendezvous/net/address.h"

namespace lockstep {

/// Parses "host:port", "192.0.2.1:port" or "[2001:db8::1]:port" with a port from 1 to 65535. Throws UsageError, quoting
/// the text, for anything else.
Endpoint parse_endpoint(const std::string& text);

/// The inverse of parse_endpoint(): an IPv6 address is put in brackets.
std::string to_string(const Endpoint& endpoint);

/// Returns whether all addresses of `host` are loopback addresses. False for a name that does not resolve.
bool is_loopback(const std::string& host);

/// Returns a nonblocking socket that listens at this address only; accepted sockets inherit TCP_NODELAY. Port 0 lets
/// the system choose. If the name has several addresses, uses the first one that this host has. Throws SystemError on
/// failure; if the port is in use, the message names its owner if visible. `remedy` replaces the advice about
/// MASTER_ADDR in the message, for endpoints that MASTER_ADDR does not determine.
FileDescriptor listen_at(const Endpoint& endpoint, const char* remedy = nullptr);

/// Returns the local port of the socket.
int port_of(const FileDescriptor& socket);

/// The pause between two attempts to connect doubles from kFirstPause to kMaxPause.
constexpr std::chrono::milliseconds kFirstPause(5);
constexpr std::chrono::milliseconds kMaxPause(100);

/// Callback of a blocking function, called about every kBetweenCalls. An exception that it throws ends the wait.
using OnWait = std::function<void()>;
constexpr std::chrono::milliseconds kBetweenCalls(100);

/// Returns a connected nonblocking socket with TCP_NODELAY. Retries until the deadline, at least once, while nothing
/// listens at the endpoint or its name does not resolve; then throws TimeoutError with the endpoint and the last
/// reason. Throws SystemError for local errors. Resolving a name may block for seconds past the deadline.
FileDescriptor connect_to(const Endpoint& endpoint, std::chrono::steady_clock::time_point deadline,
                          const OnWait& on_wait = {});

/// Starts one attempt to connect, for event loops. The socket is connected if `error` is 0. If `error` is EINPROGRESS,
/// wait until the socket is writable and call connection_error().
FileDescriptor begin_connecting(const Address& address, int& error);
/// Returns 0 if the socket is connected to the address, else the errno.
int connection_error(const FileDescriptor& socket, const Address& address);

/// Returns the local numeric address of the socket.
std::string local_address(const FileDescriptor& socket);

/// Describes the remote end: "192.0.2.1:4711", or "a disconnected peer".
std::string peer_of(const FileDescriptor& socket);

}  // namespace lockstep
