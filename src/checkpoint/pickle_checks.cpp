#include <algorithm>
#include <string>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "checkpoint/pickle.h"

namespace lockstep::detail {
namespace {

void check_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) throw UsageError("a checkpoint cannot hold an undefined tensor; leave it out, or store None");
  const auto refuse = [&](const auto& what) {
    throw UsageError(text("a checkpoint cannot hold a ", what, " tensor (sizes ", tensor.sizes(), ", ",
                          python_name(tensor.scalar_type()), "); convert it to a dense one"));
  };
  if (tensor.layout() != c10::kStrided) refuse("sparse");
  if (tensor.is_quantized()) refuse("quantized");
  if (tensor.is_meta()) refuse("meta");
}

/// Whether the bytes are UTF-8 that Python can decode.
bool is_utf8(const std::string& content) {
  for (size_t i = 0; i < content.size();) {
    const auto byte = [&](size_t at) { return at < content.size() ? static_cast<unsigned char>(content[at]) : 0u; };
    const unsigned first = byte(i), second = byte(i + 1);
    const size_t size = first < 0x80   ? 1
                        : first < 0xc2 ? 0
                        : first < 0xe0 ? 2
                        : first < 0xf0 ? 3
                        : first < 0xf5 ? 4
                                       : 0;
    if (size == 0) return false;
    for (size_t j = 1; j < size; ++j)
      if ((byte(i + j) & 0xc0) != 0x80) return false;
    if (first == 0xe0 && second < 0xa0) return false;  // longer than needed, likewise 0xf0
    if (first == 0xed && second > 0x9f) return false;  // a surrogate
    if ((first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f)) return false;
    i += size;
  }
  return true;
}

bool is_hashable(const Value& value) {
  if (value.is(Value::Kind::kTuple)) return std::all_of(value.elements().begin(), value.elements().end(), is_hashable);
  return !value.is(Value::Kind::kList) && !value.is(Value::Kind::kSet) && !value.is(Value::Kind::kDict);
}

void check_value(const Value& value, size_t depth) {
  if (depth > kMaxNesting)
    throw UsageError(text("a checkpoint cannot hold values that are nested more than ", kMaxNesting, " deep"));
  const auto check_key = [&](const Value& key, const char* what) {
    if (!is_hashable(key))
      throw UsageError(text("a checkpoint cannot hold ", what, " ", key.to_string(60),
                            ": Python cannot hash it; use a number, a string or a tuple"));
    check_value(key, depth + 1);
  };
  switch (value.kind()) {
    case Value::Kind::kTensor:
      return check_tensor(value.tensor());
    case Value::Kind::kString:
      if (!is_utf8(value.as_string()))
        throw UsageError(text("a checkpoint cannot hold a string that is not UTF-8 (", value.as_string().size(),
                              " bytes); store it as Value::bytes"));
      return;
    case Value::Kind::kList:
    case Value::Kind::kTuple:
      for (const auto& element : value.elements()) check_value(element, depth + 1);
      return;
    case Value::Kind::kSet:
      for (const auto& element : value.elements()) check_key(element, "the element of a set");
      return;
    case Value::Kind::kDict:
      for (const auto& [key, item] : value.items()) {
        check_key(key, "the key");
        check_value(item, depth + 1);
      }
      return;
    case Value::Kind::kObject:
      throw UsageError(
          text("a checkpoint cannot hold an object of Python's class ", value.type(), "; store its entries in a dict"));
    default:
      return;
  }
}

}  // namespace

void check_can_be_saved(const Value& value) {
  check_value(value, 0);
}

}  // namespace lockstep::detail
