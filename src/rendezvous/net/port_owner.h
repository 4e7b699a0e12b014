#pragma once

#include <string>

#include "rendezvous/net/address.h"

namespace lockstep {

/// The process whose socket keeps others from listening at this address, for people: "pid 1234 (python3)". Empty when
/// it cannot be seen: it belongs to another user, to another container, or is gone by now.
std::string port_owner(const Address& address);

}  // namespace lockstep
