#include "checkpoint/entries.h"

#include <algorithm>
#include <iostream>
#include <map>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <lockstep/checkpoint_file.h>
#include <lockstep/error.h>

#include "checkpoint/listing.h"

namespace lockstep::checkpoint {
namespace {

using Kind = Value::Kind;
using nlohmann::ordered_json;

bool is_sequence(const Value& value) {
  return value.is(Kind::kList) || value.is(Kind::kTuple) || value.is(Kind::kSet);
}

void add_leaves(const Value& value, const std::string& path, std::vector<Leaf>& leaves) {
  const auto inside = [&](const std::string& key) { return path.empty() ? key : path + "." + key; };
  const auto add_elements = [&] {
    for (size_t i = 0; i < value.elements().size(); ++i)
      add_leaves(value.elements()[i], inside(std::to_string(i)), leaves);
  };
  const auto add_items = [&] {
    for (const auto& [key, item] : value.items()) add_leaves(item, inside(key_text(key)), leaves);
  };
  if (value.is(Kind::kObject)) {
    leaves.push_back({inside("__class__"), value.type()});
    add_elements();
    add_items();
  } else if (value.is(Kind::kDict) && value.size() > 0) {
    add_items();
  } else if (is_sequence(value) && value.size() > 0) {
    add_elements();
  } else {
    leaves.push_back({path, value});
  }
}

/// The bytes of its storage that a tensor spans. Empty for a tensor without memory of its own.
struct Span {
  const void* storage = nullptr;
  int64_t begin = 0, end = 0;
};

Span span_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.numel() == 0 || !tensor.has_storage()) return {};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto size = static_cast<int64_t>(tensor.element_size());
  return {tensor.storage().unsafeGetStorageImpl(), tensor.storage_offset() * size,
          (tensor.storage_offset() + last + 1) * size};
}

}  // namespace

std::string key_text(const Value& key) {
  return key.is(Kind::kString) ? key.as_string() : key.to_string(80);
}

std::vector<Leaf> leaves_of(const Value& value) {
  std::vector<Leaf> leaves;
  add_leaves(value, "", leaves);
  return leaves;
}

std::vector<NamedTensor> tensors_of(const Value& value) {
  std::vector<NamedTensor> tensors;
  for (const auto& leaf : leaves_of(value))
    if (leaf.value.is(Kind::kTensor)) tensors.push_back({leaf.path, leaf.value.tensor()});
  return tensors;
}

std::vector<std::vector<std::string>> overlapping(const std::vector<NamedTensor>& tensors) {
  std::map<const void*, std::vector<std::pair<Span, const NamedTensor*>>> by_storage;
  for (const auto& named : tensors)
    if (const auto span = span_of(named.tensor); span.storage) by_storage[span.storage].push_back({span, &named});
  std::vector<std::vector<std::string>> groups;
  for (auto& [storage, members] : by_storage) {
    std::stable_sort(members.begin(), members.end(),
                     [](const auto& a, const auto& b) { return a.first.begin < b.first.begin; });
    int64_t end = 0;
    std::vector<std::string> group;
    const auto close = [&] {
      if (group.size() > 1) groups.push_back(std::move(group));
      group.clear();
    };
    for (const auto& [span, named] : members) {
      if (span.begin >= end) close();
      group.push_back(named->name);
      end = std::max(end, span.end);
    }
    close();
  }
  std::sort(groups.begin(), groups.end());  // not by address
  return groups;
}

std::string shape_text(const at::Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return fmt::format("[{}]", fmt::join(sizes.begin(), sizes.end(), ", "));
}

uint64_t bytes_of(const at::Tensor& tensor) {
  return static_cast<uint64_t>(tensor.numel()) * tensor.element_size();
}

ordered_json to_json(const Value& value) {
  switch (value.kind()) {
    case Kind::kNone:
      return nullptr;
    case Kind::kBool:
      return value.as_bool();
    case Kind::kInt:
      return value.as_int();
    case Kind::kFloat:
      return value.as_double();
    case Kind::kString:
      return value.as_string();
    case Kind::kTensor:
      return {{"shape", value.tensor().sizes().vec()}, {"dtype", python_name(value.tensor().scalar_type())}};
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kSet: {
      auto list = ordered_json::array();
      for (const auto& element : value.elements()) list.push_back(to_json(element));
      return list;
    }
    case Kind::kDict: {
      auto object = ordered_json::object();
      for (const auto& [key, item] : value.items()) object[key_text(key)] = to_json(item);
      return object;
    }
    default:
      return value.to_string();
  }
}

void print_json(const ordered_json& object) {
  std::cout << object.dump(-1, ' ', false, ordered_json::error_handler_t::replace) << std::endl;
}

const Value* find_entry(const Value& value, const char* key) {
  return value.is(Kind::kDict) ? value.find(key) : nullptr;
}

Value load_whole(const std::string& path) {
  require_file(path);
  return load_merged_checkpoint(path);
}

}  // namespace lockstep::checkpoint
