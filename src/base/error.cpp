#include "base/error.h"

#include <algorithm>
#include <array>

namespace lockstep {

Error::Error(const std::string& message) : std::runtime_error(message) {}

// Out of line, so that the type information lives in one library and a catch works across its boundary.
Error::~Error() = default;
UsageError::~UsageError() = default;
PeerError::~PeerError() = default;
TimeoutError::~TimeoutError() = default;
MismatchError::~MismatchError() = default;
CheckpointError::~CheckpointError() = default;
SystemError::~SystemError() = default;

ErrorKind Error::kind() const noexcept {
  return ErrorKind::kError;
}
ErrorKind UsageError::kind() const noexcept {
  return ErrorKind::kUsage;
}
ErrorKind PeerError::kind() const noexcept {
  return ErrorKind::kPeer;
}
ErrorKind TimeoutError::kind() const noexcept {
  return ErrorKind::kTimeout;
}
ErrorKind MismatchError::kind() const noexcept {
  return ErrorKind::kMismatch;
}
ErrorKind CheckpointError::kind() const noexcept {
  return ErrorKind::kCheckpoint;
}
ErrorKind SystemError::kind() const noexcept {
  return ErrorKind::kSystem;
}

namespace {

// In the order of ErrorKind.
constexpr std::array kKindNames{"Error",         "UsageError",      "PeerError",  "TimeoutError",
                                "MismatchError", "CheckpointError", "SystemError"};
static_assert(kKindNames.size() == static_cast<size_t>(ErrorKind::kSystem) + 1);

}  // namespace

const char* name_of(ErrorKind kind) {
  return kKindNames[static_cast<size_t>(kind)];
}

std::optional<ErrorKind> parse_error_kind(std::string_view name) {
  const auto found = std::find(kKindNames.begin(), kKindNames.end(), name);
  if (found == kKindNames.end()) return std::nullopt;
  return static_cast<ErrorKind>(found - kKindNames.begin());
}

void throw_error(ErrorKind kind, const std::string& message) {
  switch (kind) {
    case ErrorKind::kUsage:
      throw UsageError(message);
    case ErrorKind::kPeer:
      throw PeerError(message);
    case ErrorKind::kTimeout:
      throw TimeoutError(message);
    case ErrorKind::kMismatch:
      throw MismatchError(message);
    case ErrorKind::kCheckpoint:
      throw CheckpointError(message);
    case ErrorKind::kSystem:
      throw SystemError(message);
    case ErrorKind::kError:
      break;
  }
  throw Error(message);
}

void rethrow_with_prefix(const std::exception_ptr& error, const std::string& prefix, const std::string& suffix) {
  const std::string message = prefix + message_of(error) + suffix;
  try {
    std::rethrow_exception(error);
  } catch (const Error& original) {
    if (original.kind() != ErrorKind::kError) throw_error(original.kind(), message);
    std::throw_with_nested(Error(message));  // the exception that it already nests must not be lost
  } catch (...) {
    std::throw_with_nested(Error(message));
  }
}

ErrorKind kind_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& original) {
    return original.kind();
  } catch (...) {
    return ErrorKind::kError;
  }
}

bool is_ours(const std::exception_ptr& error) {
  return is_a<Error>(error);
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& original) {
    return original.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

}  // namespace lockstep
