#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include <ATen/core/ivalue.h>

namespace lockstep {

/// The bytes are not an object that to_bytes() has written, or the object cannot be written.
class ObjectError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Serializes None, booleans, numbers, strings, dense CPU tensors, and lists, tuples and dictionaries of these. Throws
/// ObjectError for anything else. LibTorch's own pickle format is not used: its reader corrupts memory if a peer sends
/// malformed bytes.
std::string to_bytes(const c10::IValue& object);

/// The inverse of to_bytes(). Throws ObjectError for any other bytes. Allocates no more memory than a small multiple of
/// the number of bytes.
c10::IValue from_bytes(std::string_view bytes);

}  // namespace lockstep
