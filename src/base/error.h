#pragma once

#include <exception>
#include <optional>
#include <string>
#include <string_view>

#include <lockstep/error.h>

namespace lockstep {

/// The kind with this name; none for other names.
std::optional<ErrorKind> parse_error_kind(std::string_view name);

/// Throws an error of this kind.
[[noreturn]] void throw_error(ErrorKind kind, const std::string& message, std::optional<int> rank = {},
                              std::optional<Culprit> culprit = {});

/// Removes "rank N: " from the beginning of a message, so that a text that names the rank itself does not name it
/// twice. With `rank`, only if N is this rank: another rank is information.
std::string without_rank(std::string_view message, std::optional<int> rank = {});

/// Throws `error` again with `prefix` before its message and `suffix` after it: lockstep's errors keep their kind and
/// culprit, other errors become an Error that holds the original nested. `rank` is the rank that the prefix names,
/// which the message then does not name again; without one, the error keeps its rank. If nothing would change, rethrows
/// the original exception.
[[noreturn]] void rethrow_with_prefix(const std::exception_ptr& error, const std::string& prefix,
                                      const std::string& suffix = "", std::optional<int> rank = {});

/// Whether `error` is an exception of the type `Kind`.
template <class Kind>
bool is_a(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Kind&) {
    return true;
  } catch (...) {
    return false;
  }
}

/// The kind of an exception; kError for exceptions that are not lockstep's.
ErrorKind kind_of(const std::exception_ptr& error);
/// Error::rank() and Error::culprit(); none for exceptions that are not lockstep's.
std::optional<int> rank_of(const std::exception_ptr& error);
std::optional<Culprit> culprit_of(const std::exception_ptr& error);

/// Whether `error` is a lockstep::Error.
bool is_lockstep_error(const std::exception_ptr& error);

/// The type that a program knows: std::throw_with_nested throws a "std::_Nested_exception<lockstep::Error>", which is a
/// "lockstep::Error". Other names stay as they are.
std::string without_nesting(std::string_view type);

/// The message of an exception, whatever its type.
std::string message_of(const std::exception_ptr& error);

}  // namespace lockstep
