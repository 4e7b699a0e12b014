#include "comm/object_bytes.h"

#include <cstring>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "base/text.h"

// The format: a value is its tag (one byte) and its contents. Numbers have 8 bytes in the byte order of the machine.
// Strings are preceded by their length. A list begins with the type of its elements, a dictionary with the types of its
// keys and values, so that an empty one keeps its type. A type is a tag, too, followed by the types that it contains.

namespace lockstep {
namespace {

enum class Tag : char {
  kNone = 'N',
  kBool = 'B',
  kInt = 'I',
  kDouble = 'D',
  kComplex = 'C',
  kString = 'S',
  kTensor = 'T',
  kList = 'L',
  kDict = 'M',
  kTuple = 'U',
  kOptional = 'O',  // only as a type
  kAny = 'A',       // only as a type
};

constexpr int kMaxNested = 100;

bool can_be_key(const c10::Type& type) {
  const auto kind = type.kind();
  return kind == c10::TypeKind::StringType || kind == c10::TypeKind::IntType || kind == c10::TypeKind::FloatType ||
         kind == c10::TypeKind::BoolType || kind == c10::TypeKind::ComplexType;
}

class Writer {
 public:
  void value(const c10::IValue& value, int depth = 0) {
    check_depth(depth);
    if (value.isNone()) return tag(Tag::kNone);
    if (value.isBool()) return tagged(Tag::kBool, static_cast<int64_t>(value.toBool()));
    if (value.isInt()) return tagged(Tag::kInt, value.toInt());
    if (value.isDouble()) return tagged(Tag::kDouble, value.toDouble());
    if (value.isComplexDouble()) return tagged(Tag::kComplex, value.toComplexDouble());
    if (value.isTensor()) return tensor(value.toTensor());
    if (value.isString()) {
      tag(Tag::kString);
      return string(value.toStringRef());
    }
    if (value.isTuple()) {
      const auto& items = value.toTupleRef().elements();
      tagged(Tag::kTuple, static_cast<int64_t>(items.size()));
      for (const auto& item : items) this->value(item, depth + 1);
      return;
    }
    if (value.isList()) {
      const auto list = value.toList();
      tag(Tag::kList);
      type(*list.elementType(), depth + 1);
      number(static_cast<int64_t>(list.size()));
      for (size_t i = 0; i < list.size(); ++i) this->value(list.get(i), depth + 1);
      return;
    }
    if (value.isGenericDict()) {
      const auto dict = value.toGenericDict();
      if (!can_be_key(*dict.keyType()))
        throw ObjectError(text("a dictionary with keys of type ", dict.keyType()->str(), " cannot be sent"));
      tag(Tag::kDict);
      type(*dict.keyType(), depth + 1);
      type(*dict.valueType(), depth + 1);
      number(static_cast<int64_t>(dict.size()));
      for (const auto& entry : dict) {
        this->value(entry.key(), depth + 1);
        this->value(entry.value(), depth + 1);
      }
      return;
    }
    throw ObjectError(text("a ", value.tagKind(), " cannot be sent"));
  }

  std::string take() { return std::move(bytes_); }

 private:
  static void check_depth(int depth) {
    if (depth > kMaxNested) throw ObjectError(text("it is nested more than ", kMaxNested, " levels deep"));
  }

  void tag(Tag tag) { bytes_ += static_cast<char>(tag); }

  template <class Number>
  void number(Number number) {
    bytes_.append(reinterpret_cast<const char*>(&number), sizeof number);
  }

  template <class Number>
  void tagged(Tag tag, Number number) {
    this->tag(tag);
    this->number(number);
  }

  void string(const std::string& string) {
    number(static_cast<int64_t>(string.size()));
    bytes_ += string;
  }

  // A dense tensor keeps its strides; any other tensor becomes contiguous.
  void tensor(const at::Tensor& tensor) {
    tag(Tag::kTensor);
    if (!tensor.defined()) return number(int64_t{-1});
    if (!tensor.is_cpu() || tensor.layout() != c10::kStrided || tensor.is_quantized())
      throw ObjectError(text("a tensor on ", tensor.device(), " with layout ", tensor.layout(),
                             " cannot be sent: only dense CPU tensors can"));
    auto dense = tensor.detach().resolve_conj().resolve_neg();
    if (!dense.is_non_overlapping_and_dense()) dense = dense.contiguous();
    number(static_cast<int64_t>(dense.scalar_type()));
    number(static_cast<int64_t>(tensor.requires_grad()));
    number(dense.dim());
    for (int64_t i = 0; i < dense.dim(); ++i) number(dense.size(i));
    for (int64_t i = 0; i < dense.dim(); ++i) number(dense.stride(i));
    bytes_.append(static_cast<const char*>(dense.data_ptr()), dense.nbytes());
  }

  void type(const c10::Type& type, int depth) {
    check_depth(depth);
    switch (type.kind()) {
      case c10::TypeKind::NoneType:
        return tag(Tag::kNone);
      case c10::TypeKind::BoolType:
        return tag(Tag::kBool);
      case c10::TypeKind::IntType:
        return tag(Tag::kInt);
      case c10::TypeKind::FloatType:
        return tag(Tag::kDouble);
      case c10::TypeKind::ComplexType:
        return tag(Tag::kComplex);
      case c10::TypeKind::StringType:
        return tag(Tag::kString);
      case c10::TypeKind::TensorType:
        return tag(Tag::kTensor);
      case c10::TypeKind::AnyType:
        return tag(Tag::kAny);
      case c10::TypeKind::ListType:
        return contained(Tag::kList, type, depth);
      case c10::TypeKind::DictType:
        return contained(Tag::kDict, type, depth);
      case c10::TypeKind::OptionalType:
        return contained(Tag::kOptional, type, depth);
      case c10::TypeKind::TupleType:
        tag(Tag::kTuple);
        number(static_cast<int64_t>(type.containedTypes().size()));
        for (const auto& part : type.containedTypes()) this->type(*part, depth + 1);
        return;
      default:
        throw ObjectError(text("a container of ", type.str(), " cannot be sent"));
    }
  }

  void contained(Tag tag, const c10::Type& type, int depth) {
    this->tag(tag);
    for (const auto& part : type.containedTypes()) this->type(*part, depth + 1);
  }

  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  c10::IValue value(int depth = 0) {
    switch (tag(depth)) {
      case Tag::kNone:
        return {};
      case Tag::kBool:
        return number<int64_t>() != 0;
      case Tag::kInt:
        return number<int64_t>();
      case Tag::kDouble:
        return number<double>();
      case Tag::kComplex:
        return number<c10::complex<double>>();
      case Tag::kString:
        return std::string(take(number<int64_t>()));
      case Tag::kTensor:
        return tensor();
      case Tag::kTuple: {
        std::vector<c10::IValue> items;
        for (int64_t left = count(); left > 0; --left) items.push_back(value(depth + 1));
        return c10::ivalue::Tuple::create(std::move(items));
      }
      case Tag::kList: {
        c10::impl::GenericList list(type(depth + 1));
        for (int64_t left = count(); left > 0; --left) list.push_back(value_of(list.elementType(), depth + 1));
        return list;
      }
      case Tag::kDict: {
        const auto key_type = type(depth + 1), value_type = type(depth + 1);
        if (!can_be_key(*key_type)) malformed("a dictionary cannot have such keys");
        c10::impl::GenericDict dict(key_type, value_type);
        for (int64_t left = count(); left > 0; --left) {
          auto key = value_of(key_type, depth + 1);
          dict.insert_or_assign(std::move(key), value_of(value_type, depth + 1));
        }
        return dict;
      }
      default:
        malformed("an unknown kind of value");
    }
  }

  void end() const {
    if (!bytes_.empty()) malformed("bytes follow the object");
  }

 private:
  [[noreturn]] static void malformed(const char* why) { throw ObjectError(text("malformed object: ", why)); }

  std::string_view take(int64_t count) {
    if (count < 0 || static_cast<uint64_t>(count) > bytes_.size()) malformed("it ends too early");
    const auto taken = bytes_.substr(0, static_cast<size_t>(count));
    bytes_.remove_prefix(taken.size());
    return taken;
  }

  template <class Number>
  Number number() {
    Number number;
    std::memcpy(&number, take(sizeof number).data(), sizeof number);
    return number;
  }

  Tag tag(int depth) {
    if (depth > kMaxNested) malformed("it is nested too deeply");
    return static_cast<Tag>(take(1)[0]);
  }

  /// The number of elements that follow; each has at least one byte.
  int64_t count() {
    const auto count = number<int64_t>();
    if (count < 0 || static_cast<uint64_t>(count) > bytes_.size()) malformed("it has fewer elements than it says");
    return count;
  }

  c10::IValue value_of(const c10::TypePtr& type, int depth) {
    auto value = this->value(depth);
    if (!value.type()->isSubtypeOf(*type)) malformed("an element does not have the type of its container");
    return value;
  }

  c10::TypePtr type(int depth) {
    switch (tag(depth)) {
      case Tag::kNone:
        return c10::NoneType::get();
      case Tag::kBool:
        return c10::BoolType::get();
      case Tag::kInt:
        return c10::IntType::get();
      case Tag::kDouble:
        return c10::FloatType::get();
      case Tag::kComplex:
        return c10::ComplexType::get();
      case Tag::kString:
        return c10::StringType::get();
      case Tag::kTensor:
        return c10::TensorType::get();
      case Tag::kAny:
        return c10::AnyType::get();
      case Tag::kList:
        return c10::ListType::create(type(depth + 1));
      case Tag::kOptional:
        return c10::OptionalType::create(type(depth + 1));
      case Tag::kDict: {
        auto key = type(depth + 1);
        return c10::DictType::create(std::move(key), type(depth + 1));
      }
      case Tag::kTuple: {
        std::vector<c10::TypePtr> parts;
        for (int64_t left = count(); left > 0; --left) parts.push_back(type(depth + 1));
        return c10::TupleType::create(std::move(parts));
      }
      default:
        malformed("an unknown type");
    }
  }

  at::Tensor tensor() {
    const auto dtype = number<int64_t>();
    if (dtype == -1) return {};
    const bool requires_grad = number<int64_t>() != 0;
    const auto dim = count();
    std::vector<int64_t> sizes, strides;
    for (int64_t i = 0; i < dim; ++i) sizes.push_back(number<int64_t>());
    for (int64_t i = 0; i < dim; ++i) strides.push_back(number<int64_t>());
    const auto elements = dense_elements(sizes, strides);
    const auto scalar_type = checked_dtype(dtype);
    const auto data = take(checked_product(elements, static_cast<int64_t>(c10::elementSize(scalar_type))));
    auto result = at::empty_strided(sizes, strides, at::TensorOptions(scalar_type));
    if (!result.is_non_overlapping_and_dense()) malformed("the strides of a tensor overlap");
    if (!data.empty()) std::memcpy(result.data_ptr(), data.data(), data.size());
    if (requires_grad) {
      if (!c10::isFloatingType(scalar_type) && !c10::isComplexType(scalar_type)) malformed("a tensor of integers");
      result.requires_grad_();
    }
    return result;
  }

  static c10::ScalarType checked_dtype(int64_t number) {
    for (const auto dtype :
         {c10::kByte, c10::kChar, c10::kShort, c10::kInt, c10::kLong, c10::kHalf, c10::kFloat, c10::kDouble,
          c10::ScalarType::ComplexHalf, c10::kComplexFloat, c10::kComplexDouble, c10::kBool, c10::kBFloat16})
      if (number == static_cast<int64_t>(dtype)) return dtype;
    malformed("a tensor has an unknown dtype");
  }

  static int64_t checked_product(int64_t a, int64_t b) {
    int64_t product = 0;
    if (__builtin_mul_overflow(a, b, &product)) malformed("a tensor is too large");
    return product;
  }

  /// Returns the number of elements. The strides must reach exactly as far, so that no more memory is allocated.
  static int64_t dense_elements(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
    int64_t elements = 1, last = 0;
    for (const auto size : sizes) {
      if (size < 0) malformed("a tensor has a negative size");
      elements = checked_product(elements, size);
    }
    for (size_t i = 0; i < sizes.size() && elements > 0; ++i) {
      if (strides[i] < 0 || __builtin_add_overflow(last, checked_product(sizes[i] - 1, strides[i]), &last))
        malformed("a tensor has strides out of range");
    }
    if (elements > 0 && last != elements - 1) malformed("a tensor has gaps");
    if (elements == 0)
      for (const auto stride : strides)
        if (stride < 0) malformed("a tensor has a negative stride");
    return elements;
  }

  std::string_view bytes_;
};

}  // namespace

std::string to_bytes(const c10::IValue& object) {
  Writer writer;
  writer.value(object);
  return writer.take();
}

c10::IValue from_bytes(std::string_view bytes) {
  try {
    Reader reader(bytes);
    auto object = reader.value();
    reader.end();
    return object;
  } catch (const c10::Error& error) {  // LibTorch refuses a type or a size
    throw ObjectError(text("malformed object: ", error.what_without_backtrace()));
  }
}

}  // namespace lockstep
