#include "rendezvous/failure.h"

#include "base/error.h"

namespace lockstep {

namespace {

// Other ranks act on these two kinds only.
ErrorKind kind_for_peers(ErrorKind kind) {
  return kind == ErrorKind::kTimeout || kind == ErrorKind::kMismatch ? kind : ErrorKind::kPeer;
}

}  // namespace

std::exception_ptr to_exception(const Failure& failure) {
  try {
    throw_error(kind_for_peers(parse_error_kind(failure.kind).value_or(ErrorKind::kPeer)), failure.message);
  } catch (...) {
    return std::current_exception();
  }
}

Failure to_failure(const std::exception_ptr& error) {
  return {name_of(kind_for_peers(kind_of(error))), message_of(error)};
}

}  // namespace lockstep
