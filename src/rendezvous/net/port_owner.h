#pragma once

#include <string>

#include "rendezvous/net/address.h"

namespace lockstep {

/// Describes the process whose socket occupies this address: "pid 1234 (python3)". Returns "" if the process is not
/// visible: it belongs to another user or container, or has ended.
std::string port_owner(const Address& address);

}  // namespace lockstep
