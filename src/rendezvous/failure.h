#pragma once

#include <exception>
#include <string>

namespace lockstep {

/// Why a group or a whole job is over, in a form that travels between ranks.
struct Failure {
  std::string kind;  // "TimeoutError", "MismatchError" or "PeerError"
  std::string message;

  bool operator==(const Failure&) const = default;
};

/// An error of this kind; a kind that is not known is a PeerError.
std::exception_ptr to_exception(const Failure& failure);

/// What the other ranks are told: errors of kinds that mean nothing to them become "PeerError".
Failure to_failure(const std::exception_ptr& error);

}  // namespace lockstep
