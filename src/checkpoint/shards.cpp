#include "checkpoint/shards.h"

#include <algorithm>
#include <exception>
#include <map>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/error.h"
#include "base/text.h"
#include "checkpoint/archive.h"
#include "checkpoint/files.h"

namespace lockstep {
namespace detail {
namespace {

std::vector<int64_t> integers_in(const Value& list) {
  std::vector<int64_t> numbers;
  for (const auto& number : list.elements()) numbers.push_back(number.as_int());
  return numbers;
}

/// The state of a parameter, put together from pieces.
struct MergedState {
  Value values = Value::dict();
  std::map<std::string, int64_t> filled{};  // elements of the tensors that are cut
};

/// Adds the state of a piece of a parameter to that of the whole parameter.
void add_piece(MergedState& merged, const Value& piece, const Value& sizes, const Value& strides) {
  auto& whole = merged.values;
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
    if (begin < 0 || size < 0 || size > row.numel() || begin > row.numel() - size)
      throw CheckpointError(
          text("a shard has ", size, " elements from ", begin, " of a parameter with ", row.numel(), " elements"));
    row.narrow(0, begin, size).copy_(value.tensor());
    merged.filled[name.as_string()] += size;
  }
}

}  // namespace

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
  } catch (const CheckpointError& error) {
    return error.what();
  }
}

Value load_shard(const std::string& folder, const ShardFile& shard, const LoadOptions& options) {
  try {
    const FileSource source(text(folder, "/", shard.file));
    const ArchiveReader reader(source);
    if (reader.sha256() != shard.sha256) throw CheckpointError("is of another checkpoint");
    return reader.load(options);
  } catch (const CheckpointError&) {
    rethrow_with_prefix(std::current_exception(), text("shard ", folder, "/", shard.file, ": "));
  }
}

Value merge_shards(const std::vector<Value>& shards) {
  if (shards.empty()) throw CheckpointError("there are no shards");
  const auto& sizes = shards[0].at("sizes").elements();
  const auto& strides = shards[0].at("strides").elements();
  std::vector<MergedState> states(sizes.size());
  for (const auto& shard : shards)
    for (const auto& piece : shard.at("pieces").elements()) {
      const auto parameter = static_cast<size_t>(piece.at("parameter").as_int());
      if (parameter >= states.size() || strides.size() != sizes.size())
        throw CheckpointError(text("a shard has parameter ", parameter, ", expected ", sizes.size(), " parameters"));
      add_piece(states[parameter], piece, sizes[parameter], strides[parameter]);
    }
  auto state = Value::dict();
  for (size_t i = 0; i < states.size(); ++i) {
    for (const auto& [name, filled] : states[i].filled)
      if (const auto expected = states[i].values.at(name).tensor().numel(); filled != expected)
        throw CheckpointError(text("the shards have ", filled, " elements of '", name, "' of parameter ", i,
                                   ", expected ", expected, ": a shard is missing or listed twice"));
    if (states[i].values.size() > 0) state.items().emplace_back(i, std::move(states[i].values));
  }
  return Value::dict({{"state", std::move(state)}, {"param_groups", shards[0].at("param_groups")}});
}

}  // namespace detail

std::vector<ShardFile> shards_of(const Value& checkpoint) {
  using Kind = Value::Kind;
  const bool is_ours = checkpoint.is(Kind::kDict) && checkpoint.contains("lockstep");
  const auto* list = is_ours ? checkpoint.find(detail::kShards) : nullptr;
  if (!list) return {};
  const auto text_in = [](const Value& item, const char* key) -> std::string {
    const auto* found = item.is(Kind::kDict) ? item.find(key) : nullptr;
    return found && found->is(Kind::kString) ? found->as_string() : "";
  };
  std::vector<ShardFile> shards;
  if (list->is(Kind::kList))
    for (const auto& item : list->elements()) shards.push_back({text_in(item, "file"), text_in(item, "sha256")});
  const auto is_wrong = [](const ShardFile& shard) {
    return shard.file.empty() || shard.sha256.empty() || shard.file.find('/') != std::string::npos;
  };
  if (shards.empty() || std::any_of(shards.begin(), shards.end(), is_wrong))
    throw CheckpointError(text("entry '", detail::kShards, "' is ", list->to_string(60),
                               ", expected a list of {'file': name in the same folder, 'sha256': digest}"));
  return shards;
}

Value load_merged_checkpoint(const std::string& path, const LoadOptions& options) {
  auto value = load_checkpoint(path, options);
  const auto prefix = text("checkpoint ", path, ": ");
  try {
    const auto files = shards_of(value);
    if (files.empty()) return value;
    if (!options.map_location.is_meta()) {
      std::vector<Value> shards;
      for (const auto& shard : files) shards.push_back(detail::load_shard(detail::folder_of(path), shard, options));
      value.erase(detail::kShards);
      for (const auto& [name, first] : shards[0].items()) {
        std::vector<Value> of_object;
        for (const auto& shard : shards) of_object.push_back(shard.at(name));
        value.set(name, detail::merge_shards(of_object));
      }
      return value;
    }
  } catch (const UsageError& error) {  // a key is missing, or a value is of another kind
    throw CheckpointError(text(prefix, "its shards are invalid: ", error.what()));
  } catch (const CheckpointError&) {
    rethrow_with_prefix(std::current_exception(), prefix);
  }
  throw UsageError("load_merged_checkpoint: shards cannot be merged without their data; load to another device");
}

}  // namespace lockstep
