// Archives of LibTorch, which classes with save() and load() use, as values.

#include <sstream>

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>

#include <lockstep/error.h>
#include <lockstep/state_traits.h>

#include "base/text.h"
#include "checkpoint/archive.h"

namespace lockstep::detail {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;
using Kind = Value::Kind;

bool all_are(const std::vector<Value>& values, Kind kind) {
  for (const auto& value : values)
    if (!value.is(kind)) return false;
  return !values.empty();
}

template <class T, class Get>
c10::List<T> list_of(const std::vector<Value>& values, const Get& get) {
  c10::List<T> list;
  for (const auto& value : values) list.push_back(get(value));
  return list;
}

void fill(OutputArchive& archive, const Value& dict) {
  for (const auto& [key, value] : dict.items()) {
    if (value.is(Kind::kDict)) {
      OutputArchive inner(archive.compilation_unit());
      fill(inner, value);
      archive.write(key.as_string(), inner);
    } else if (value.is(Kind::kTensor)) {
      archive.write(key.as_string(), value.tensor());
    } else {
      archive.write(key.as_string(), ivalue_of(value));
    }
  }
}

}  // namespace

Value value_of(const c10::IValue& value) {
  if (value.isNone()) return {};
  if (value.isTensor()) return value.toTensor();
  if (value.isBool()) return value.toBool();
  if (value.isInt()) return value.toInt();
  if (value.isDouble()) return value.toDouble();
  if (value.isString()) return value.toStringRef();
  if (value.isDevice()) return value.toDevice();
  if (value.isTuple() || value.isList()) {
    std::vector<Value> elements;
    if (value.isTuple())
      for (const auto& element : value.toTupleRef().elements()) elements.push_back(value_of(element));
    else
      for (const auto& element : value.toListRef()) elements.push_back(value_of(element));
    return value.isTuple() ? Value::tuple(std::move(elements)) : Value::list(std::move(elements));
  }
  if (value.isGenericDict()) {
    Value::Items items;
    for (const auto& item : value.toGenericDict()) items.emplace_back(value_of(item.key()), value_of(item.value()));
    return Value::dict(std::move(items));
  }
  throw UsageError(text("a checkpoint cannot hold a value of LibTorch's type ", value.tagKind()));
}

c10::IValue ivalue_of(const Value& value) {
  switch (value.kind()) {
    case Kind::kNone:
      return {};
    case Kind::kBool:
      return value.as_bool();
    case Kind::kInt:
      return value.as_int();
    case Kind::kFloat:
      return value.as_double();
    case Kind::kString:
      return value.as_string();
    case Kind::kTensor:
      return value.tensor();
    case Kind::kDevice:
      return value.device();
    case Kind::kTuple: {
      std::vector<c10::IValue> elements;
      for (const auto& element : value.elements()) elements.push_back(ivalue_of(element));
      return c10::ivalue::Tuple::create(std::move(elements));
    }
    case Kind::kList: {
      const auto& elements = value.elements();
      if (all_are(elements, Kind::kInt)) return list_of<int64_t>(elements, [](const Value& v) { return v.as_int(); });
      if (all_are(elements, Kind::kFloat))
        return list_of<double>(elements, [](const Value& v) { return v.as_double(); });
      if (all_are(elements, Kind::kTensor))
        return list_of<at::Tensor>(elements, [](const Value& v) { return v.tensor(); });
      c10::impl::GenericList list(c10::AnyType::get());
      for (const auto& element : elements) list.push_back(ivalue_of(element));
      return list;
    }
    default:
      throw UsageError(text("LibTorch has no value for a ", name_of(value.kind()), ": ", value.to_string(80)));
  }
}

Value value_of_archive(const std::function<void(OutputArchive&)>& save) {
  OutputArchive archive(std::make_shared<torch::jit::CompilationUnit>());
  save(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  const auto bytes = std::move(stream).str();
  const MemorySource source(bytes);
  return ArchiveReader(source).load({});
}

void load_as_archive(const Value& value, const std::function<void(InputArchive&)>& load) {
  OutputArchive written(std::make_shared<torch::jit::CompilationUnit>());
  fill(written, value);
  std::stringstream bytes;
  written.save_to(bytes);
  InputArchive archive;
  archive.load_from(bytes);
  load(archive);
}

}  // namespace lockstep::detail
