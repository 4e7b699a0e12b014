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

/// Calls `visit(value)` for the value and all values in it, while `path` is the path of the visited value.
template <class Visit>
void for_each_value(const Value& value, Path& path, const Visit& visit) {
  visit(value);
  if (!is_container(value)) return;
  for_each_inside(value, [&](const std::string& key, const Value& inner) {
    path.inside(key, [&] { for_each_value(inner, path, visit); });
  });
}

/// Adds, limited to the largest number: a few bytes of a file may stand for tensors of 2^62 elements each.
void add_up(uint64_t& sum, uint64_t number) {
  if (__builtin_add_overflow(sum, number, &sum)) sum = std::numeric_limits<uint64_t>::max();
}

Contents contents_of_leaf(const Value& leaf) {
  Contents contents;
  if (leaf.is(Kind::kTensor))
    contents.totals.add(leaf.tensor());
  else
    contents.has_others = true;
  return contents;
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

PathBudget::PathBudget(std::string file, std::string remedy)
    : file_(std::move(file)), remedy_(std::move(remedy)), file_bytes_(find_files({file_})[0].bytes_with_shards()) {}

void PathBudget::spend(const std::string& path) {
  constexpr uint64_t kGrowth = 32, kFreeBytes = 1 << 20;
  ++paths_;
  bytes_ += path.size();
  if (bytes_ > kFreeBytes + kGrowth * file_bytes_)
    throw CheckpointError(
        fmt::format("{}: the paths of the first {} entries have {} bytes, expected {} for each of the file's {} bytes, "
                    "and 1 MiB: entries with long keys, or nested deeply, contain too many others; {}",
                    file_, paths_, bytes_, kGrowth, file_bytes_, remedy_));
}

Leaves leaves_of(const Value& value, PathBudget& budget) {
  Leaves leaves;
  Path path;
  const auto add = [&](const Value& leaf) {
    budget.spend(path.text());
    leaves.all.push_back({path.text(), &leaf});
  };
  for_each_value(value, path, [&](const Value& visited) {
    if (visited.is(Kind::kObject)) path.inside("__class__", [&] { add(leaves.classes.emplace_back(visited.type())); });
    if (!is_container(visited)) add(visited);
  });
  return leaves;
}

std::vector<NamedTensor> tensors_of(const Value& value, PathBudget& budget) {
  std::vector<NamedTensor> tensors;
  Path path;
  for_each_value(value, path, [&](const Value& visited) {
    if (!visited.is(Kind::kTensor)) return;
    budget.spend(path.text());
    tensors.push_back({path.text(), visited.tensor()});
  });
  return tensors;
}

void Totals::add(const at::Tensor& tensor) {
  add_up(tensors, 1);
  add_up(elements, static_cast<uint64_t>(tensor.numel()));
  add_up(bytes, bytes_of(tensor));
}

void Contents::add(const Contents& other) {
  add_up(totals.tensors, other.totals.tensors);
  add_up(totals.elements, other.totals.elements);
  add_up(totals.bytes, other.totals.bytes);
  has_others = has_others || other.has_others;
}

Contents ContentsOf::compute(const Value& value) {
  if (!is_container(value)) return contents_of_leaf(value);
  Contents all;
  all.has_others = value.is(Kind::kObject);  // its class
  for_each_inside(value, [&](const std::string&, const Value& inner) { all.add(compute(inner)); });
  return containers_[&value] = all;
}

Contents ContentsOf::operator[](const Value& value) const {
  return is_container(value) ? containers_.at(&value) : contents_of_leaf(value);
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
      object.reserve(value.size());          // to grow copies all entries
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
  // dump() with this handler of invalid UTF-8, but without the text in memory.
  nlohmann::detail::serializer<ordered_json> writer(nlohmann::detail::output_adapter<char>(std::cout), ' ',
                                                    ordered_json::error_handler_t::replace);
  writer.dump(object, false, false, 0);
  std::cout << std::endl;
}

const Value* find_entry(const Value& value, const char* key) {
  return value.is(Kind::kDict) ? value.find(key) : nullptr;
}

Value load_whole(const std::string& path) {
  require_file(path);
  return load_merged_checkpoint(path);
}

}  // namespace lockstep::checkpoint
