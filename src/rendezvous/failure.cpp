#include "rendezvous/failure.h"

#include <lockstep/error.h>

#include "base/error.h"

namespace lockstep {

std::exception_ptr to_exception(const Failure& failure) {
  if (failure.kind == "TimeoutError") return std::make_exception_ptr(TimeoutError(failure.message));
  if (failure.kind == "MismatchError") return std::make_exception_ptr(MismatchError(failure.message));
  return std::make_exception_ptr(PeerError(failure.message));
}

Failure to_failure(const std::exception_ptr& error) {
  std::string message = message_of(error);
  try {
    std::rethrow_exception(error);
  } catch (const TimeoutError&) {
    return {"TimeoutError", message};
  } catch (const MismatchError&) {
    return {"MismatchError", message};
  } catch (...) {
    return {"PeerError", message};
  }
}

}  // namespace lockstep
