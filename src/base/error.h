#pragma once

#include <exception>
#include <string>

namespace lockstep {

/// Throws `error` again with `prefix` before its message and `suffix` after it: lockstep's errors keep their kind,
/// others become an Error that holds the original nested.
[[noreturn]] void rethrow_with_prefix(const std::exception_ptr& error, const std::string& prefix,
                                      const std::string& suffix = "");

/// Whether it is an exception of this kind.
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

/// Whether it is a lockstep::Error.
bool is_ours(const std::exception_ptr& error);

/// The message of an exception, whatever its type.
std::string message_of(const std::exception_ptr& error);

}  // namespace lockstep
