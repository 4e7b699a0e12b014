#include "base/error.h"

#include <lockstep/error.h>

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

namespace {

template <class Kind>
void rethrow_kind(const Error& error, const std::string& message) {
  if (dynamic_cast<const Kind*>(&error)) throw Kind(message);
}

}  // namespace

void rethrow_with_prefix(const std::exception_ptr& error, const std::string& prefix, const std::string& suffix) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& original) {
    std::string message = prefix + original.what() + suffix;
    rethrow_kind<UsageError>(original, message);
    rethrow_kind<PeerError>(original, message);
    rethrow_kind<TimeoutError>(original, message);
    rethrow_kind<MismatchError>(original, message);
    rethrow_kind<CheckpointError>(original, message);
    rethrow_kind<SystemError>(original, message);
    std::throw_with_nested(Error(message));  // what an earlier pass has nested must not be lost
  } catch (const std::exception& original) {
    std::throw_with_nested(Error(prefix + original.what() + suffix));
  } catch (...) {
    std::throw_with_nested(Error(prefix + message_of(error) + suffix));
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
