#include "base/error.h"

#include <algorithm>
#include <array>

#include "base/text.h"

namespace lockstep {

Error::Error(const std::string& message) : std::runtime_error(message) {}
Error::Error(int rank, const std::string& message)
    : std::runtime_error(text("rank ", rank, ": ", without_rank(message, rank))), rank_(rank) {}
Error::Error(const std::string& message, std::optional<int> rank, std::optional<Culprit> culprit)
    : std::runtime_error(message), rank_(rank), culprit_(culprit) {}

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

void throw_error(ErrorKind kind, const std::string& message, std::optional<int> rank, std::optional<Culprit> culprit) {
  switch (kind) {
    case ErrorKind::kUsage:
      throw UsageError(message, rank, culprit);
    case ErrorKind::kPeer:
      throw PeerError(message, rank, culprit);
    case ErrorKind::kTimeout:
      throw TimeoutError(message, rank, culprit);
    case ErrorKind::kMismatch:
      throw MismatchError(message, rank, culprit);
    case ErrorKind::kCheckpoint:
      throw CheckpointError(message, rank, culprit);
    case ErrorKind::kSystem:
      throw SystemError(message, rank, culprit);
    case ErrorKind::kError:
      break;
  }
  throw Error(message, rank, culprit);
}

std::string without_rank(std::string_view message, std::optional<int> rank) {
  constexpr std::string_view kBegin = "rank ", kEnd = ": ";
  const size_t end = message.find(kEnd);
  if (!message.starts_with(kBegin) || end == message.npos) return std::string(message);
  const auto named = parse_number<int>(message.substr(kBegin.size(), end - kBegin.size()));
  const bool is_redundant = named && (!rank || rank == named);
  return std::string(is_redundant ? message.substr(end + kEnd.size()) : message);
}

void rethrow_with_prefix(const std::exception_ptr& error, const std::string& prefix, const std::string& suffix,
                         std::optional<int> rank) {
  const bool names_rank = rank && prefix.starts_with(text("rank ", *rank, ": "));
  if (!rank) rank = rank_of(error);
  if (prefix.empty() && suffix.empty() && rank == rank_of(error)) std::rethrow_exception(error);
  const std::string own = names_rank ? without_rank(message_of(error), rank) : message_of(error);
  const std::string message = prefix + own + suffix;
  const auto culprit = culprit_of(error);
  if (kind_of(error) != ErrorKind::kError) throw_error(kind_of(error), message, rank, culprit);
  try {
    std::rethrow_exception(error);
  } catch (...) {
    std::throw_with_nested(Error(message, rank, culprit));  // keeps the exceptions that it nests
  }
}

namespace {

template <class Value>
Value read(const std::exception_ptr& error, Value (Error::*member)() const noexcept, Value otherwise) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& original) {
    return (original.*member)();
  } catch (...) {
    return otherwise;
  }
}

}  // namespace

ErrorKind kind_of(const std::exception_ptr& error) {
  return read(error, &Error::kind, ErrorKind::kError);
}

std::optional<int> rank_of(const std::exception_ptr& error) {
  return read<std::optional<int>>(error, &Error::rank, std::nullopt);
}

std::optional<Culprit> culprit_of(const std::exception_ptr& error) {
  return read<std::optional<Culprit>>(error, &Error::culprit, std::nullopt);
}

bool is_lockstep_error(const std::exception_ptr& error) {
  return is_a<Error>(error);
}

std::string without_nesting(std::string_view type) {
  for (const std::string_view nesting : {"std::_Nested_exception<", "std::__1::__nested<", "std::__nested<"})
    if (type.starts_with(nesting) && type.ends_with('>'))
      return std::string(type.substr(nesting.size(), type.size() - nesting.size() - 1));
  return std::string(type);
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
