#include "checkpoint/shards.h"

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "checkpoint/files.h"

namespace lockstep {
namespace detail {
namespace {

std::vector<int64_t> integers_in(const Value& list) {
  std::vector<int64_t> numbers;
  for (const auto& number : list.elements()) numbers.push_back(number.as_int());
  return numbers;
}

/// Adds the state of a piece of a parameter to that of the whole parameter.
void add_piece(Value& whole, const Value& piece, const Value& sizes, const Value& strides) {
  const auto begin = piece.at("begin").as_int(), size = piece.at("size").as_int();
  for (const auto& [name, value] : piece.at("state").items()) {
    const bool is_cut = value.is(Value::Kind::kTensor) && value.tensor().dim() == 1 && value.tensor().numel() == size;
    if (!is_cut) {
      if (!whole.contains(name)) whole.set(name, value);
      continue;
    }
    if (!whole.contains(name))
      whole.set(name, at::empty_strided(integers_in(sizes), integers_in(strides), value.tensor().options()));
    const auto row = whole.at(name).tensor().as_strided({whole.at(name).tensor().numel()}, {1});
    if (begin < 0 || size < 0 || begin + size > row.numel())
      throw CheckpointError(text("a shard has elements ", begin, " to ", begin + size, " of a parameter with ",
                                 row.numel(), " elements"));
    row.narrow(0, begin, size).copy_(value.tensor());
  }
}

}  // namespace

std::vector<ShardFile> shards_of(const Value& checkpoint) {
  std::vector<ShardFile> shards;
  const auto* list = checkpoint.is(Value::Kind::kDict) ? checkpoint.find(kShards) : nullptr;
  if (!list) return shards;
  for (const auto& item : list->elements()) {
    shards.push_back({item.at("file").as_string(), item.at("sha256").as_string()});
    if (shards.back().file.find('/') != std::string::npos)
      throw CheckpointError(text("its shard '", shards.back().file, "' is not in the checkpoint's folder"));
  }
  return shards;
}

Value list_of_shards(const std::vector<ShardFile>& shards) {
  auto list = Value::list();
  for (const auto& shard : shards)
    list.elements().push_back(Value::dict({{"file", shard.file}, {"sha256", shard.sha256}}));
  return list;
}

std::string verify_shard(const std::string& folder, const ShardFile& shard) {
  try {
    const auto found = verify_checkpoint(text(folder, "/", shard.file));
    if (!found.damage.empty()) return text("shard ", shard.file, ": ", describe(found.damage[0]));
    if (found.sha256 != shard.sha256) return text("shard ", shard.file, " is of another checkpoint");
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

Value merge_shards(const std::vector<Value>& shards) {
  if (shards.empty()) throw CheckpointError("there are no shards");
  const auto& sizes = shards[0].at("sizes").elements();
  const auto& strides = shards[0].at("strides").elements();
  std::vector<Value> states(sizes.size(), Value::dict());
  for (const auto& shard : shards)
    for (const auto& piece : shard.at("pieces").elements()) {
      const auto parameter = static_cast<size_t>(piece.at("parameter").as_int());
      if (parameter >= states.size() || strides.size() != sizes.size())
        throw CheckpointError(text("a shard has parameter ", parameter, ", expected ", sizes.size(), " parameters"));
      add_piece(states[parameter], piece, sizes[parameter], strides[parameter]);
    }
  auto state = Value::dict();
  for (size_t i = 0; i < states.size(); ++i)
    if (states[i].size() > 0) state.items().emplace_back(i, std::move(states[i]));
  return Value::dict({{"state", std::move(state)}, {"param_groups", shards[0].at("param_groups")}});
}

}  // namespace detail

Value load_merged_checkpoint(const std::string& path, const LoadOptions& options) {
  auto value = load_checkpoint(path, options);
  const auto files = detail::shards_of(value);
  if (files.empty()) return value;
  if (options.map_location.is_meta())
    throw UsageError("load_merged_checkpoint: shards cannot be merged without their data; load to another device");
  std::vector<Value> shards;
  for (const auto& shard : files)
    shards.push_back(load_checkpoint(text(detail::folder_of(path), "/", shard.file), options));
  std::erase_if(value.items(), [](const auto& item) { return item.first == Value(detail::kShards); });
  for (const auto& [name, first] : shards[0].items()) {
    std::vector<Value> of_object;
    for (const auto& shard : shards) of_object.push_back(shard.at(name));
    value.set(name, detail::merge_shards(of_object));
  }
  return value;
}

}  // namespace lockstep
