#pragma once

#include <exception>
#include <string>
#include <vector>

#include <lockstep/error.h>

namespace lockstep {

/// Why a group or a whole job failed, in the form that is sent between ranks.
struct Failure {
  ErrorKind kind = ErrorKind::kPeer;  // kTimeout, kMismatch or kPeer
  std::string message;
  std::optional<Culprit> culprit{};
  std::optional<int> reporter{};  // the rank, in the job, that the message begins with

  bool operator==(const Failure&) const = default;
};

/// Encodes a failure for a message of the store: kind, message, rank and role of the culprit, reporter. Unknown values
/// are empty; the last three fields are left out if all are empty.
std::vector<std::string> to_fields(const Failure& failure);
/// Decodes the fields from index `first` on; unknown kinds become kPeer. Throws ProtocolError.
Failure read_failure(const std::vector<std::string>& fields, size_t first = 0);

/// Returns an exception with this kind, message and culprit, and with the reporter as its rank.
std::exception_ptr to_exception(const Failure& failure);

/// Converts an exception to the failure that other ranks receive. Kinds other than kTimeout and kMismatch become kPeer.
Failure to_failure(const std::exception_ptr& error);

}  // namespace lockstep
