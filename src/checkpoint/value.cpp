#include <lockstep/value.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {
namespace {

/// LibTorch's names of dtypes, and Python's. Names are used because the supported versions do not all have all of them.
constexpr std::pair<const char*, const char*> kDtypes[] = {
    {"Float", "float32"},
    {"Double", "float64"},
    {"Half", "float16"},
    {"BFloat16", "bfloat16"},
    {"Long", "int64"},
    {"Int", "int32"},
    {"Short", "int16"},
    {"Char", "int8"},
    {"Byte", "uint8"},
    {"Bool", "bool"},
    {"ComplexHalf", "complex32"},
    {"ComplexFloat", "complex64"},
    {"ComplexDouble", "complex128"},
    {"UInt16", "uint16"},
    {"UInt32", "uint32"},
    {"UInt64", "uint64"},
    {"Float8_e5m2", "float8_e5m2"},
    {"Float8_e4m3fn", "float8_e4m3fn"},
    {"Float8_e5m2fnuz", "float8_e5m2fnuz"},
    {"Float8_e4m3fnuz", "float8_e4m3fnuz"},
    {"Float8_e8m0fnu", "float8_e8m0fnu"},
};

bool same_bits(at::Tensor a, at::Tensor b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  if (a.layout() == at::kStrided && b.layout() == at::kStrided)
    for (int64_t d = 0; d < a.dim(); ++d)  // both repeat one element, perhaps 2^40 times
      if (a.size(d) > 1 && a.stride(d) == 0 && b.stride(d) == 0) {
        a = a.narrow(d, 0, 1);
        b = b.narrow(d, 0, 1);
      }
  const auto plain = [](const at::Tensor& t) { return t.detach().cpu().contiguous().resolve_conj().resolve_neg(); };
  const auto left = plain(a), right = plain(b);
  return left.nbytes() == 0 || std::memcmp(left.data_ptr(), right.data_ptr(), left.nbytes()) == 0;
}

/// Divides the magnitude, least significant word first, by 10^9 and returns the remainder. Drops leading zeros.
uint32_t divide_by_billion(std::vector<uint32_t>& magnitude) {
  uint64_t rest = 0;
  for (auto word = magnitude.rbegin(); word != magnitude.rend(); ++word) {
    const uint64_t value = rest << 32 | *word;
    *word = static_cast<uint32_t>(value / 1'000'000'000);
    rest = value % 1'000'000'000;
  }
  while (!magnitude.empty() && magnitude.back() == 0) magnitude.pop_back();
  return static_cast<uint32_t>(rest);
}

std::string decimal(const std::string& digits) {
  constexpr size_t kMaxBytes = 80;  // the conversion takes quadratic time
  if (digits.size() > kMaxBytes) return text("<integer of ", digits.size() * 8, " bits>");
  const bool is_negative = !digits.empty() && (digits.back() & 0x80);
  std::vector<uint32_t> magnitude((digits.size() + 3) / 4, is_negative ? ~0u : 0u);
  std::memcpy(magnitude.data(), digits.data(), digits.size());
  if (is_negative) {
    bool carries = true;
    for (auto& word : magnitude) {
      word = ~word + (carries ? 1u : 0u);
      carries = carries && word == 0;
    }
  }
  std::string result;  // the last digit first
  while (!magnitude.empty()) {
    auto group = divide_by_billion(magnitude);
    for (int i = 0; i < 9; ++i, group /= 10) result += static_cast<char>('0' + group % 10);
  }
  result.erase(result.find_last_not_of('0') + 1);
  if (result.empty()) result = "0";
  if (is_negative) result += '-';
  return {result.rbegin(), result.rend()};
}

std::string python_quoted(std::string_view content) {
  std::string result = "'";
  for (char c : content) {
    if (c == '\'' || c == '\\')
      (result += '\\') += c;
    else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)
      result += text("\\x", "0123456789abcdef"[(c >> 4) & 15], "0123456789abcdef"[c & 15]);
    else
      result += c;
  }
  return result + "'";
}

std::string shortest(double number) {
  std::array<char, 40> buffer;
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), number).ptr;
  std::string result(buffer.data(), end);
  if (result.find_first_not_of("-0123456789") == std::string::npos) result += ".0";
  return result;
}

/// Writes a value until the text is long enough.
class Printer {
 public:
  explicit Printer(size_t limit) : limit_(limit) {}

  std::string finish() && {
    if (text_.size() > limit_) {
      text_.resize(limit_ > 3 ? limit_ - 3 : 0);
      text_ += "...";
    }
    return std::move(text_);
  }

  void print(const Value& value) {
    using Kind = Value::Kind;
    if (text_.size() > limit_) return;
    switch (value.kind()) {
      case Kind::kNone:
        return put("None");
      case Kind::kBool:
        return put(value.as_bool() ? "True" : "False");
      case Kind::kInt:
        return put(std::to_string(value.as_int()));
      case Kind::kBigInt:
        return put(decimal(value.digits()));
      case Kind::kFloat:
        return put(shortest(value.as_double()));
      case Kind::kString:
        return put(python_quoted(value.as_string().substr(0, limit_)));
      case Kind::kBytes:
        return put(text("b", python_quoted(value.as_string().substr(0, limit_))));
      case Kind::kTensor:
        return value.tensor().defined()
                   ? put(text("tensor(", python_name(value.tensor().scalar_type()), ", ", value.tensor().sizes(), ")"))
                   : put("tensor(undefined)");
      case Kind::kDtype:
        return put("torch." + python_name(value.dtype()));
      case Kind::kDevice:
        return put(text("device(", python_quoted(value.device().str()), ")"));
      case Kind::kList:
        return print_all("[", value.elements(), "]");
      case Kind::kTuple:
        return print_all("(", value.elements(), value.size() == 1 ? ",)" : ")");
      case Kind::kSet:
        return print_all("{", value.elements(), "}");
      case Kind::kDict:
        put("{");
        print_items(value.items());
        return put("}");
      case Kind::kObject:
        put(value.type());
        print_all("(", value.elements(), ")");
        put("{");
        print_items(value.items());
        return put("}");
    }
  }

 private:
  void put(std::string_view piece) { text_ += piece; }

  void print_all(std::string_view open, const std::vector<Value>& elements, std::string_view close) {
    put(open);
    for (size_t i = 0; i < elements.size() && text_.size() <= limit_; ++i) {
      if (i > 0) put(", ");
      print(elements[i]);
    }
    put(close);
  }

  void print_items(const Value::Items& items) {
    for (size_t i = 0; i < items.size() && text_.size() <= limit_; ++i) {
      if (i > 0) put(", ");
      print(items[i].first);
      put(": ");
      print(items[i].second);
    }
  }

  const size_t limit_;
  std::string text_;
};

}  // namespace

const char* name_of(Value::Kind kind) {
  static constexpr const char* kNames[] = {"None",  "bool",   "int",  "int",   "float", "str",  "bytes", "tensor",
                                           "dtype", "device", "list", "tuple", "set",   "dict", "object"};
  return kNames[static_cast<size_t>(kind)];
}

std::string python_name(c10::ScalarType dtype) {
  const char* name = c10::toString(dtype);
  for (const auto& [libtorch, python] : kDtypes)
    if (std::strcmp(libtorch, name) == 0) return python;
  return name;
}

std::optional<c10::ScalarType> dtype_named(std::string_view name) {
  for (const auto& [libtorch, python] : kDtypes)
    if (name == python)
      for (int i = 0; i < static_cast<int>(c10::ScalarType::Undefined); ++i)
        if (std::strcmp(c10::toString(static_cast<c10::ScalarType>(i)), libtorch) == 0)
          return static_cast<c10::ScalarType>(i);
  return std::nullopt;
}

Value Value::list(std::vector<Value> elements) {
  return Value(std::in_place, Sequence{Kind::kList, std::move(elements)});
}

Value Value::tuple(std::vector<Value> elements) {
  return Value(std::in_place, Sequence{Kind::kTuple, std::move(elements)});
}

Value Value::set(std::vector<Value> elements) {
  return Value(std::in_place, Sequence{Kind::kSet, std::move(elements)});
}

Value Value::dict(Items items) {
  return Value(std::in_place, Dict{std::move(items)});
}

Value Value::bytes(std::string value) {
  return Value(std::in_place, Bytes{std::move(value)});
}

Value Value::integer(std::string digits) {
  const bool is_negative = !digits.empty() && (digits.back() & 0x80);
  const char sign = is_negative ? '\xff' : '\0';
  // Drop bytes that only repeat the sign.
  while (digits.size() > 1 && digits.back() == sign && ((digits[digits.size() - 2] & 0x80) != 0) == is_negative)
    digits.pop_back();
  if (digits.size() > sizeof(int64_t)) return Value(std::in_place, BigInt{std::move(digits)});
  digits.resize(sizeof(int64_t), sign);
  int64_t number = 0;
  std::memcpy(&number, digits.data(), sizeof(number));
  return number;
}

Value Value::object(std::string type, std::vector<Value> arguments, Items entries) {
  return Value(std::in_place, Object{std::move(type), std::move(arguments), std::move(entries)});
}

Value::Kind Value::kind() const {
  if (const auto* sequence = std::get_if<Sequence>(&content_)) return sequence->kind;
  static constexpr Kind kKinds[] = {Kind::kNone,   Kind::kBool,  Kind::kInt,    Kind::kBigInt, Kind::kFloat,
                                    Kind::kString, Kind::kBytes, Kind::kTensor, Kind::kDtype,  Kind::kDevice,
                                    Kind::kList,   Kind::kDict,  Kind::kObject};
  return kKinds[content_.index()];
}

void Value::refuse(std::string_view expected) const {
  throw UsageError(text("the value is of kind ", name_of(kind()), ", expected ", expected, ": ", to_string(80)));
}

template <class T>
const T& Value::get(std::string_view expected) const {
  if (const auto* found = std::get_if<T>(&content_)) return *found;
  refuse(expected);
}

bool Value::as_bool() const {
  return get<bool>("bool");
}

int64_t Value::as_int() const {
  return get<int64_t>("int");
}

double Value::as_double() const {
  if (const auto* number = std::get_if<int64_t>(&content_)) return static_cast<double>(*number);
  if (const auto* boolean = std::get_if<bool>(&content_)) return *boolean ? 1 : 0;
  return get<double>("a number");
}

const std::string& Value::as_string() const {
  if (const auto* bytes = std::get_if<Bytes>(&content_)) return bytes->content;
  return get<std::string>("str");
}

const at::Tensor& Value::tensor() const {
  return get<at::Tensor>("tensor");
}

c10::ScalarType Value::dtype() const {
  return get<c10::ScalarType>("dtype");
}

c10::Device Value::device() const {
  return get<c10::Device>("device");
}

const std::vector<Value>& Value::elements() const {
  if (const auto* object = std::get_if<Object>(&content_)) return object->arguments;
  return get<Sequence>("list, tuple or set").elements;
}

std::vector<Value>& Value::elements() {
  return const_cast<std::vector<Value>&>(std::as_const(*this).elements());
}

const Value::Items& Value::items() const {
  if (const auto* object = std::get_if<Object>(&content_)) return object->entries;
  return get<Dict>("dict").items;
}

Value::Items& Value::items() {
  return const_cast<Items&>(std::as_const(*this).items());
}

const std::string& Value::type() const {
  return get<Object>("object").type;
}

const std::string& Value::digits() const {
  return get<BigInt>("an integer of more than 64 bits").digits;
}

size_t Value::size() const {
  return std::holds_alternative<Sequence>(content_) ? elements().size() : items().size();
}

const Value* Value::find(const Value& key) const {
  for (const auto& [name, value] : items())
    if (name == key) return &value;
  return nullptr;
}

Value* Value::find(const Value& key) {
  return const_cast<Value*>(std::as_const(*this).find(key));
}

const Value& Value::at(const Value& key) const {
  if (is(Kind::kList) || is(Kind::kTuple)) {
    if (size() == 0)
      throw UsageError(text("there is no element ", key.to_string(80), " in an empty ", name_of(kind())));
    if (!key.is(Kind::kInt) || key.as_int() < 0 || key.as_int() >= static_cast<int64_t>(size()))
      throw UsageError(text("there is no element ", key.to_string(80), " in a ", name_of(kind()), " of ", size(),
                            "; expected an index from 0 to ", size() - 1));
    return elements()[static_cast<size_t>(key.as_int())];
  }
  if (const auto* found = find(key)) return *found;
  std::vector<std::string> keys;
  for (const auto& [name, value] : items()) {
    if (keys.size() == 20) {
      keys.push_back(text(items().size() - 20, " more"));
      break;
    }
    keys.push_back(name.to_string(80));
  }
  throw UsageError(text("there is no key ", key.to_string(80), "; the keys are ", enumerate(keys)));
}

Value& Value::at(const Value& key) {
  return const_cast<Value&>(std::as_const(*this).at(key));
}

void Value::set(const Value& key, Value value) {
  if (auto* found = find(key))
    *found = std::move(value);
  else
    items().emplace_back(key, std::move(value));
}

bool Value::erase(const Value& key) {
  return std::erase_if(items(), [&](const auto& item) { return item.first == key; }) > 0;
}

bool operator==(const Value& a, const Value& b) {
  if (a.kind() != b.kind()) return false;
  using Kind = Value::Kind;
  switch (a.kind()) {
    case Kind::kNone:
      return true;
    case Kind::kBool:
      return a.as_bool() == b.as_bool();
    case Kind::kInt:
      return a.as_int() == b.as_int();
    case Kind::kBigInt:
      return a.digits() == b.digits();
    case Kind::kFloat:
      return a.as_double() == b.as_double();
    case Kind::kString:
    case Kind::kBytes:
      return a.as_string() == b.as_string();
    case Kind::kTensor:
      return same_bits(a.tensor(), b.tensor());
    case Kind::kDtype:
      return a.dtype() == b.dtype();
    case Kind::kDevice:
      return a.device() == b.device();
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kSet:
      return a.elements() == b.elements();
    case Kind::kDict:
      return a.items() == b.items();
    case Kind::kObject:
      return a.type() == b.type() && a.elements() == b.elements() && a.items() == b.items();
  }
  return false;
}

std::ostream& operator<<(std::ostream& out, const Value& value) {
  return out << value.to_string();
}

std::string Value::to_string(size_t limit) const {
  Printer printer(limit);
  printer.print(*this);
  return std::move(printer).finish();
}

}  // namespace lockstep
