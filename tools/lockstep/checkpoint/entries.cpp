#include "checkpoint/entries.h"

#include <algorithm>
#include <iostream>
#include <limits>
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

void add_leaves(const Value& value, Path& path, PathBytes& bytes, Leaves& leaves) {
  const auto add = [&](const Value& leaf) {
    bytes.add(path.text());
    leaves.all.push_back({path.text(), &leaf});
  };
  if (!is_container(value)) return add(value);
  if (value.is(Kind::kObject)) path.inside("__class__", [&] { add(leaves.classes.emplace_back(value.type())); });
  for_each_inside(value, [&](const std::string& key, const Value& inner) {
    path.inside(key, [&] { add_leaves(inner, path, bytes, leaves); });
  });
}

void add_tensors(const Value& value, Path& path, std::vector<NamedTensor>& tensors) {
  if (value.is(Kind::kTensor)) tensors.push_back({path.text(), value.tensor()});
  if (!is_container(value)) return;
  for_each_inside(value, [&](const std::string& key, const Value& inner) {
    path.inside(key, [&] { add_tensors(inner, path, tensors); });
  });
}

/// At most the largest number: a few bytes of a file may stand for tensors of 2^62 elements each.
void add_up(uint64_t& sum, uint64_t number) {
  if (__builtin_add_overflow(sum, number, &sum)) sum = std::numeric_limits<uint64_t>::max();
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

bool is_container(const Value& value) {
  return value.is(Kind::kObject) || ((value.is(Kind::kDict) || is_sequence(value)) && value.size() > 0);
}

void PathBytes::add(const std::string& path) {
  constexpr uint64_t kBytesOfPath = 256, kFreeBytes = 1 << 20;
  ++paths_;
  bytes_ += path.size();
  if (bytes_ > kFreeBytes + kBytesOfPath * paths_)
    throw CheckpointError(
        fmt::format("the paths of the first {} entries have {} bytes, expected up to {} each: entries with long keys, "
                    "or nested deeply, contain too many others",
                    paths_, bytes_, kBytesOfPath));
}

Leaves leaves_of(const Value& value) {
  Leaves leaves;
  Path path;
  PathBytes bytes;
  add_leaves(value, path, bytes, leaves);
  return leaves;
}

std::vector<NamedTensor> tensors_of(const Value& value) {
  std::vector<NamedTensor> tensors;
  Path path;
  add_tensors(value, path, tensors);
  return tensors;
}

void Totals::add(const at::Tensor& tensor) {
  add_up(tensors, 1);
  add_up(elements, static_cast<uint64_t>(tensor.numel()));
  add_up(bytes, bytes_of(tensor));
}

Contents ContentsOf::add(const Value& value) {
  Contents all;
  if (value.is(Kind::kTensor)) all.totals.add(value.tensor());
  if (!is_container(value)) {
    all.has_others = !value.is(Kind::kTensor);
    return all;
  }
  all.has_others = value.is(Kind::kObject);  // its class
  for_each_inside(value, [&](const std::string&, const Value& inner) {
    const auto part = add(inner);
    add_up(all.totals.tensors, part.totals.tensors);
    add_up(all.totals.elements, part.totals.elements);
    add_up(all.totals.bytes, part.totals.bytes);
    all.has_others = all.has_others || part.has_others;
  });
  return containers_[&value] = all;
}

Contents ContentsOf::operator[](const Value& value) const {
  if (const auto found = containers_.find(&value); found != containers_.end()) return found->second;
  Contents all;
  if (value.is(Kind::kTensor)) all.totals.add(value.tensor());
  all.has_others = !value.is(Kind::kTensor);
  return all;
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
      ordered_json::object_t object;
      std::map<std::string, size_t> places;  // its own search is linear
      for (const auto& [key, item] : value.items()) {
        const auto [found, is_new] = places.emplace(key_text(key), object.size());
        if (is_new)
          object.emplace_back(found->first, to_json(item));
        else
          object.begin()[static_cast<ptrdiff_t>(found->second)].second = to_json(item);
      }
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
