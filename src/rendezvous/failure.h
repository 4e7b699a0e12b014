#pragma once

#include <exception>
#include <string>

namespace lockstep {

/// Why a group or a whole job failed, in the form that is sent between ranks.
struct Failure {
  std::string kind;  // "TimeoutError", "MismatchError" or "PeerError"
  std::string message;

  bool operator==(const Failure&) const = default;
};

/// Returns an exception of this kind; unknown kinds become PeerError.
std::exception_ptr to_exception(const Failure& failure);

/// Converts an exception to the failure that other ranks receive. Kinds other than TimeoutError and MismatchError
/// become "PeerError".
Failure to_failure(const std::exception_ptr& error);

}  // namespace lockstep
