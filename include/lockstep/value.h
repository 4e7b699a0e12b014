#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <lockstep/export.h>

namespace lockstep {

/// A value in a checkpoint, as written by Python's torch.save. Dictionaries keep the order of insertion.
/// Copying a Value copies containers, but tensors share their memory, as everywhere in LibTorch. Not thread-safe.
///
/// The accessors (as_int(), at(), tensor(), ...) throw UsageError, which names the actual kind, if the value has a
/// different kind.
class LOCKSTEP_EXPORT Value {
 public:
  enum class Kind {
    kNone,
    kBool,
    kInt,
    kBigInt,  ///< an integer that does not fit into 64 bits
    kFloat,
    kString,
    kBytes,
    kTensor,
    kDtype,
    kDevice,
    kList,
    kTuple,
    kSet,
    kDict,
    kObject,  ///< an instance of a Python class, as data: the class is named, never called
  };

  using Items = std::vector<std::pair<Value, Value>>;

  Value() = default;  // None
  Value(std::nullptr_t) {}
  template <std::same_as<bool> T>
  Value(T value) : content_(value) {}
  template <std::integral T>
  requires(!std::same_as<T, bool>) Value(T value) : content_(static_cast<int64_t>(value)) {}
  template <std::floating_point T>
  Value(T value) : content_(static_cast<double>(value)) {}
  Value(const char* value) : content_(std::string(value)) {}
  Value(std::string value) : content_(std::move(value)) {}
  Value(std::string_view value) : content_(std::string(value)) {}
  Value(at::Tensor value) : content_(std::move(value)) {}
  Value(c10::ScalarType value) : content_(value) {}
  Value(c10::Device value) : content_(value) {}

  static Value list(std::vector<Value> elements = {});
  static Value tuple(std::vector<Value> elements = {});
  static Value set(std::vector<Value> elements = {});
  static Value dict(Items items = {});
  static Value bytes(std::string value);
  /// `digits` is the integer in two's complement, least significant byte first. Returns a kInt if it fits.
  static Value integer(std::string digits);
  /// An instance of the Python class `type` ("module.Class"), constructed from `arguments`, with the entries that its
  /// state or its items have.
  static Value object(std::string type, std::vector<Value> arguments, Items entries);

  Kind kind() const;
  bool is(Kind kind) const { return this->kind() == kind; }
  bool is_none() const { return is(Kind::kNone); }

  bool as_bool() const;
  int64_t as_int() const;
  double as_double() const;              // of a kFloat, kInt or kBool
  const std::string& as_string() const;  // of a kString or kBytes
  const at::Tensor& tensor() const;
  c10::ScalarType dtype() const;
  c10::Device device() const;
  /// The elements of a list, tuple or set; the arguments of an object.
  const std::vector<Value>& elements() const;
  std::vector<Value>& elements();
  /// The items of a dict; the entries of an object.
  const Items& items() const;
  Items& items();
  /// The class of an object: "module.Class".
  const std::string& type() const;
  /// The digits of a kBigInt, as for integer().
  const std::string& digits() const;

  /// The number of elements of a list, tuple or set, or of items of a dict or object.
  size_t size() const;
  /// Returns the value with this key in a dict or object; null if there is none. Linear in the number of items.
  const Value* find(const Value& key) const;
  Value* find(const Value& key);
  bool contains(const Value& key) const { return find(key) != nullptr; }
  /// Returns the value with this key in a dict or object, or with this index, from 0 on, in a list or tuple. Throws
  /// UsageError, which lists the keys or names the size, if there is none. Never inserts: use set().
  const Value& at(const Value& key) const;
  Value& at(const Value& key);
  /// The same: checkpoint["optimizer"]["param_groups"][0]["lr"].
  const Value& operator[](const Value& key) const { return at(key); }
  Value& operator[](const Value& key) { return at(key); }
  /// Sets or replaces an item of a dict.
  void set(const Value& key, Value value);
  /// Removes an item of a dict or object. Returns whether there was one.
  bool erase(const Value& key);

  /// Compares contents. Tensors are equal if dtype, sizes and all bits are equal.
  friend LOCKSTEP_EXPORT bool operator==(const Value& a, const Value& b);

  /// Returns the value as Python would print it, on one line, with tensors as "tensor(float32, [10, 84])" and at most
  /// `limit` characters.
  std::string to_string(size_t limit = 200) const;
  friend LOCKSTEP_EXPORT std::ostream& operator<<(std::ostream& out, const Value& value);

 private:
  struct Bytes {
    std::string content;
  };
  struct BigInt {
    std::string digits;
  };
  struct Sequence {
    Kind kind;
    std::vector<Value> elements;
  };
  struct Dict {
    Items items;
  };
  struct Object {
    std::string type;
    std::vector<Value> arguments;
    Items entries;
  };
  template <class T>
  explicit Value(std::in_place_t, T content) : content_(std::move(content)) {}
  [[noreturn]] void refuse(std::string_view expected) const;
  template <class T>
  const T& get(std::string_view expected) const;

  std::variant<std::monostate, bool, int64_t, BigInt, double, std::string, Bytes, at::Tensor, c10::ScalarType,
               c10::Device, Sequence, Dict, Object>
      content_{};
};

/// The name of a kind as Python has it: "int", "dict", "tensor".
LOCKSTEP_EXPORT const char* name_of(Value::Kind kind);

/// The name of a dtype in Python: "float32", "bfloat16".
LOCKSTEP_EXPORT std::string python_name(c10::ScalarType dtype);
/// The dtype with this name in Python; none if this LibTorch does not have it.
LOCKSTEP_EXPORT std::optional<c10::ScalarType> dtype_named(std::string_view name);

}  // namespace lockstep
