#include "checkpoint/shards.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <limits>
#include <map>
#include <set>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/error.h"
#include "base/text.h"
#include "checkpoint/archive.h"
#include "checkpoint/files.h"
#include "checkpoint/pickle.h"

namespace lockstep {
namespace detail {
namespace {

std::vector<int64_t> integers_in(const Value& list) {
  std::vector<int64_t> numbers;
  for (const auto& number : list.elements()) numbers.push_back(number.as_int());
  return numbers;
}

struct Piece {
  int64_t begin = 0;
  at::Tensor tensor;
};

/// An entry of a parameter's state: a whole value, or the pieces of a tensor.
struct StateEntry {
  Value name;
  Value whole;
  std::vector<Piece> pieces{};
};

/// The state of a parameter, in the order of the first pieces.
struct ParameterState {
  std::vector<StateEntry> entries{};
  std::map<std::string, size_t> index_of{};
};

/// Limits the bytes of the pieces by the bytes of their storages. Tensors of a file may repeat a few bytes, so the
/// state could be far larger than the shards.
class PieceBudget {
 public:
  void spend(const at::Tensor& piece) {
    if (__builtin_add_overflow(bytes_, piece.nbytes(), &bytes_)) bytes_ = std::numeric_limits<uint64_t>::max();
    if (storages_.insert(piece.storage().unsafeGetStorageImpl()).second) stored_ += piece.storage().nbytes();
  }
  void check() const {
    if (bytes_ > stored_)
      throw CheckpointError(text("the pieces of the shards have ", bytes_, " bytes, but only ", stored_,
                                 " bytes are stored: a piece repeats elements, or is in several places; load another "
                                 "checkpoint"));
  }

 private:
  uint64_t bytes_ = 0, stored_ = 0;
  std::set<const void*> storages_;
};

/// Adds the state of a piece of a parameter to the state of the parameter.
void add_piece(ParameterState& state, const Value& piece, PieceBudget& budget) {
  const auto begin = piece.at("begin").as_int(), size = piece.at("size").as_int();
  for (const auto& [name, value] : piece.at("state").items()) {
    const bool is_cut = value.is(Value::Kind::kTensor) && value.tensor().dim() == 1 && value.tensor().numel() == size;
    const auto [found, is_new] = state.index_of.emplace(name.as_string(), state.entries.size());
    if (is_new) state.entries.push_back({name, is_cut ? Value() : value});
    auto& entry = state.entries[found->second];
    if (is_cut && !is_new && entry.pieces.empty())
      throw CheckpointError(text("a shard stores '", name.as_string(), "' as elements, another shard as one value"));
    if (!is_cut) continue;
    budget.spend(value.tensor());
    entry.pieces.push_back({begin, value.tensor()});
  }
}

/// Returns the number of elements. Throws CheckpointError unless the elements fill a memory without gaps.
int64_t checked_elements(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  int64_t elements = 1, last = 0;
  bool fits = sizes.size() == strides.size() && sizes.size() <= kMaxDimensions;
  const bool is_empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
  for (size_t d = 0; fits && d < sizes.size(); ++d) {
    int64_t extent = 0;
    fits = sizes[d] >= 0 && strides[d] >= 0 &&
           !__builtin_mul_overflow(elements, std::max<int64_t>(1, sizes[d]), &elements) &&
           !__builtin_mul_overflow(std::max<int64_t>(1, sizes[d]) - 1, strides[d], &extent) &&
           !__builtin_add_overflow(last, extent, &last);
  }
  if (!fits || (!is_empty && last != elements - 1))
    throw CheckpointError(text("a shard has a parameter of sizes ", at::IntArrayRef(sizes), " and strides ",
                               at::IntArrayRef(strides), ", expected memory without gaps"));
  return is_empty ? 0 : elements;
}

/// Returns a tensor of all pieces, which must have each of its elements once.
at::Tensor join_pieces(StateEntry& entry, size_t parameter, const Value& sizes, const Value& strides) {
  const auto shape = integers_in(sizes), steps = integers_in(strides);
  const auto elements = checked_elements(shape, steps);
  std::sort(entry.pieces.begin(), entry.pieces.end(), [](const Piece& a, const Piece& b) {
    return std::pair(a.begin, a.tensor.numel()) < std::pair(b.begin, b.tensor.numel());
  });
  int64_t next = 0;
  for (const auto& [begin, tensor] : entry.pieces) {
    const auto size = tensor.numel();
    if (begin != next || size > elements - next)
      throw CheckpointError(text("'", entry.name.as_string(), "' of parameter ", parameter, ": a shard has ", size,
                                 " elements starting at ", begin, ", expected at most ", elements - next,
                                 " starting at ", next, ": a shard is missing, or overlaps another"));
    if (tensor.scalar_type() != entry.pieces[0].tensor.scalar_type())
      throw CheckpointError(text("the shards have elements of '", entry.name.as_string(), "' as ",
                                 python_name(entry.pieces[0].tensor.scalar_type()), " and as ",
                                 python_name(tensor.scalar_type())));
    next += size;
  }
  if (next != elements)
    throw CheckpointError(text("the shards have ", next, " elements of '", entry.name.as_string(), "' of parameter ",
                               parameter, ", expected ", elements, ": a shard is missing"));
  auto whole = at::empty_strided(shape, steps, entry.pieces[0].tensor.options());
  const auto row = whole.as_strided({elements}, {1});
  for (const auto& [begin, tensor] : entry.pieces) row.narrow(0, begin, tensor.numel()).copy_(tensor);
  return whole;
}

/// Merges the shards of an object. All objects share `budget`.
Value merge_object(const std::vector<Value>& shards, PieceBudget& budget) {
  if (shards.empty()) throw CheckpointError("there are no shards");
  const auto& sizes = shards[0].at("sizes").elements();
  const auto& strides = shards[0].at("strides").elements();
  std::vector<ParameterState> states(sizes.size());
  for (const auto& shard : shards)
    for (const auto& piece : shard.at("pieces").elements()) {
      const auto parameter = static_cast<size_t>(piece.at("parameter").as_int());
      if (parameter >= states.size() || strides.size() != sizes.size())
        throw CheckpointError(text("a shard has parameter ", parameter, ", expected ", sizes.size(), " parameters"));
      add_piece(states[parameter], piece, budget);
    }
  budget.check();
  auto state = Value::dict();
  for (size_t i = 0; i < states.size(); ++i) {
    auto values = Value::dict();
    for (auto& entry : states[i].entries) {
      if (!entry.pieces.empty()) entry.whole = join_pieces(entry, i, sizes[i], strides[i]);
      values.items().emplace_back(std::move(entry.name), std::move(entry.whole));
    }
    if (values.size() > 0) state.items().emplace_back(i, std::move(values));
  }
  return Value::dict({{"state", std::move(state)}, {"param_groups", shards[0].at("param_groups")}});
}

/// The entries of a shard, for many lookups.
std::map<std::string_view, Value*> entries_by_name(Value& dict) {
  std::map<std::string_view, Value*> entries;
  for (auto& [key, item] : dict.items())
    if (!entries.emplace(key.as_string(), &item).second)
      throw CheckpointError(text("two entries have the name '", key.as_string(), "'"));
  return entries;
}

/// Moves all objects of the shards to a checkpoint.
void merge_into(Value& checkpoint, std::vector<Value>& shards) {
  std::vector<std::map<std::string_view, Value*>> entries_of;
  for (auto& shard : shards) entries_of.push_back(entries_by_name(shard));
  std::map<std::string_view, Value*> entries;
  for (auto& [key, item] : checkpoint.items())
    if (key.is(Value::Kind::kString)) entries.emplace(key.as_string(), &item);
  auto added = Value::dict();
  PieceBudget budget;
  for (const auto& [name, first] : shards[0].items()) {
    std::vector<Value> of_object;
    for (size_t i = 0; i < shards.size(); ++i) {
      const auto found = entries_of[i].find(name.as_string());
      if (found == entries_of[i].end())
        throw CheckpointError(text("shard ", i, " has no entry '", name.as_string(), "'"));
      of_object.push_back(std::move(*found->second));
    }
    auto merged = merge_object(of_object, budget);
    if (const auto found = entries.find(name.as_string()); found != entries.end())
      *found->second = std::move(merged);
    else
      added.items().emplace_back(name, std::move(merged));
  }
  std::move(added.items().begin(), added.items().end(), std::back_inserter(checkpoint.items()));
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
  PieceBudget budget;
  return merge_object(shards, budget);
}

}  // namespace detail

std::vector<ShardFile> shards_of(const Value& checkpoint) {
  using Kind = Value::Kind;
  const bool is_lockstep_checkpoint = checkpoint.is(Kind::kDict) && checkpoint.contains("lockstep");
  const auto* list = is_lockstep_checkpoint ? checkpoint.find(detail::kShards) : nullptr;
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
  std::set<std::string_view> names;
  for (const auto& shard : shards)  // a shard that is listed twice would be read twice
    if (!names.insert(shard.file).second)
      throw CheckpointError(text("entry '", detail::kShards, "' lists ", shard.file, " twice"));
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
      detail::merge_into(value, shards);
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
