#include "optim/zero/shard_state.h"

#include <algorithm>
#include <map>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "checkpoint/shards.h"
#include "comm/run_and_agree.h"
#include "optim/layout.h"
#include "optim/optimizer_state.h"

namespace lockstep::detail {
namespace {

using Values = OptimizerState::Values;

/// Whether a value of a state has one element for each element of the parameter and is divided with it. Others, such as
/// the step count, apply to the whole parameter.
bool is_cut(const c10::IValue& value, at::IntArrayRef sizes) {
  return value.isTensor() && value.toTensor().sizes() == sizes;
}

at::Tensor range_of(const at::Tensor& dense, const ShardPiece& piece) {
  return as_row(dense).narrow(0, piece.begin, piece.size);
}

// --- serialization of a piece's state as nested tuples

c10::IValue pack(const ShardPiece& piece, const Values& values) {
  std::vector<c10::IValue> items{static_cast<int64_t>(piece.parameter), piece.begin, piece.size};
  for (const auto& [name, value] : values) {
    items.emplace_back(name);
    items.push_back(value.isTensor() ? c10::IValue(value.toTensor().cpu()) : value);
  }
  return c10::ivalue::Tuple::create(std::move(items));
}

std::pair<ShardPiece, Values> unpack(const c10::IValue& packed) {
  const auto& items = packed.toTupleRef().elements();
  std::pair<ShardPiece, Values> result{{static_cast<size_t>(items[0].toInt()), items[1].toInt(), items[2].toInt()}, {}};
  for (size_t i = 3; i < items.size(); i += 2) result.second[items[i].toStringRef()] = items[i + 1];
  return result;
}

/// Returns the groups with the numbers and names of all parameters, instead of this rank's pieces.
std::vector<OptimizerState::Group> complete_groups(const ShardedParameters& parameters,
                                                   std::vector<OptimizerState::Group> groups) {
  for (auto& group : groups) group.parameters.clear();
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto& group = groups[parameters.group_of(i)];
    group.parameters.push_back(static_cast<int64_t>(i));
    if (i < parameters.names().size()) group.names.push_back(parameters.names()[i]);
  }
  return groups;
}

void check_names(const ShardedParameters& parameters, const std::vector<std::string>& names) {
  const auto& ours = parameters.names();
  for (size_t i = 0; i < std::min(names.size(), ours.size()); ++i)
    if (names[i] != ours[i])
      throw UsageError(parameters.group().rank(),
                       text("load_state_dict: parameter ", i, " is '", ours[i], "' here and '", names[i],
                            "' in the state; the state belongs to another model, or its order differs"));
}

void load_inner(Shard& shard, const OptimizerState& inner_state) {
  auto& inner = shard.inner();
  set_optimizer_state(inner, inner_state);
  for (size_t g = 0; g < inner.param_groups().size(); ++g)
    shard.outer().param_groups()[g].set_options(inner.param_groups()[g].options().clone());
  shard.mark_complete();
}

}  // namespace

// --- complete

Value consolidated_state(const Shard& shard, int dst) {
  const auto& group = shard.group();
  const auto& parameters = shard.parameters();
  run_and_agree(group, [&] { shard.check_complete(); });
  group.synchronize();
  shard.copy_options();
  auto inner_state = get_optimizer_state(shard.inner());
  std::vector<c10::IValue> packed;
  for (size_t i = 0; i < parameters.pieces().size(); ++i)
    if (const auto found = inner_state.parameters.find(static_cast<int64_t>(i)); found != inner_state.parameters.end())
      packed.push_back(pack(parameters.pieces()[i].overall, found->second));
  const auto all = group.gather_object(c10::ivalue::Tuple::create(std::move(packed)), dst);
  if (group.rank() != dst) return {};

  OptimizerState state{.groups = complete_groups(parameters, std::move(inner_state.groups))};
  for (const auto& rank : all)
    for (const auto& item : rank.toTupleRef().elements()) {
      const auto [piece, values] = unpack(item);
      const auto& parameter = parameters.tensor(piece.parameter);
      auto& together = state.parameters[static_cast<int64_t>(piece.parameter)];
      for (const auto& [name, value] : values) {
        if (parameters.is_whole(piece) || !is_cut(value, {piece.size})) {
          together[name] = value;
          continue;
        }
        auto& whole = together[name];
        if (!whole.isTensor())
          whole = at::empty_strided(parameter.sizes(), parameter.strides(), value.toTensor().options());
        range_of(whole.toTensor(), piece).copy_(value.toTensor());
      }
    }
  return to_value(state);
}

void load_state(Shard& shard, const Value& value) {
  const auto state = to_optimizer_state(value);
  check_fits(shard.outer(), state);
  const auto& parameters = shard.parameters();
  std::vector<int64_t> numbers;  // the number of each of this optimizer's parameters in the state
  std::vector<std::string> names;
  for (const auto& group : state.groups) {
    numbers.insert(numbers.end(), group.parameters.begin(), group.parameters.end());
    names.insert(names.end(), group.names.begin(), group.names.end());
  }
  check_names(parameters, names);
  OptimizerState inner_state;
  for (const auto& group : state.groups) inner_state.groups.push_back({.options = group.options});
  for (size_t i = 0; i < parameters.pieces().size(); ++i) {
    const auto& piece = parameters.pieces()[i].overall;
    inner_state.groups[parameters.group_of(piece.parameter)].parameters.push_back(static_cast<int64_t>(i));
    const auto found = state.parameters.find(numbers[piece.parameter]);
    if (found == state.parameters.end()) continue;
    const auto& parameter = parameters.tensor(piece.parameter);
    for (const auto& [name, value] : found->second)
      inner_state.parameters[static_cast<int64_t>(i)][name] =
          parameters.is_whole(piece) || !is_cut(value, parameter.sizes())
              ? value
              : c10::IValue(range_of(laid_out_as(parameter, value.toTensor()), piece));
  }
  load_inner(shard, inner_state);
}

// --- shards

Value state_of_shard(const Shard& shard) {
  shard.check_complete();
  shard.copy_options();
  const auto& parameters = shard.parameters();
  const auto inner_state = get_optimizer_state(shard.inner());
  auto sizes = Value::list(), strides = Value::list(), pieces = Value::list();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& parameter = parameters.tensor(i);
    sizes.elements().push_back(Value::list({parameter.sizes().begin(), parameter.sizes().end()}));
    strides.elements().push_back(Value::list({parameter.strides().begin(), parameter.strides().end()}));
  }
  for (size_t i = 0; i < parameters.pieces().size(); ++i) {
    const auto found = inner_state.parameters.find(static_cast<int64_t>(i));
    if (found == inner_state.parameters.end()) continue;
    const auto& piece = parameters.pieces()[i].overall;
    const auto& parameter = parameters.tensor(piece.parameter);
    auto state = Value::dict();
    for (const auto& [name, value] : found->second) {
      const bool is_one_each = value.isTensor() && value.toTensor().numel() == piece.size && name != "step";
      state.set(name, is_one_each && parameters.is_whole(piece)
                          ? Value(as_row(laid_out_as(parameter, value.toTensor())))
                          : value_of(value));
    }
    pieces.elements().push_back(Value::dict(
        {{"parameter", piece.parameter}, {"begin", piece.begin}, {"size", piece.size}, {"state", std::move(state)}}));
  }
  const auto groups = to_value({.groups = complete_groups(parameters, inner_state.groups)}).at("param_groups");
  return Value::dict({{"param_groups", groups},
                      {"sizes", std::move(sizes)},
                      {"strides", std::move(strides)},
                      {"pieces", std::move(pieces)}});
}

namespace {

void check_same_parameters(const ShardedParameters& parameters, const Value& shard) {
  const int rank = parameters.group().rank();
  const auto& sizes = shard.at("sizes").elements();
  if (sizes.size() != parameters.size())
    throw UsageError(rank, text("load_shards: the state has ", sizes.size(), " parameters, expected ",
                                parameters.size(), "; build the model that was saved"));
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto ours = parameters.tensor(i).sizes();
    if (sizes[i] != Value::list({ours.begin(), ours.end()}))
      throw UsageError(rank, text("load_shards: ", parameters.name_of(i), " is ", ours, " here and ", sizes[i],
                                  " in the state; build the model that was saved"));
  }
  std::vector<std::string> names;
  for (const auto& group : shard.at("param_groups").elements())
    if (const auto* listed = group.find("param_names"))
      for (const auto& name : listed->elements()) names.push_back(name.as_string());
  check_names(parameters, names);
  for (const auto& piece : shard.at("pieces").elements()) {
    const auto parameter = piece.at("parameter").as_int(), begin = piece.at("begin").as_int();
    const auto size = piece.at("size").as_int();
    const auto in = parameter < 0 || parameter >= static_cast<int64_t>(parameters.size())
                        ? -1
                        : parameters.tensor(static_cast<size_t>(parameter)).numel();
    if (begin < 0 || size < 0 || size > in || begin > in - size)
      throw CheckpointError(rank, text("load_shards: a shard has ", size, " elements from ", begin, " of parameter ",
                                       parameter, ", which has ", in, " elements"));
  }
}

/// Whether ranges of elements in memory order are the same elements in this optimizer and in the state.
bool has_same_layout(const ShardedParameters& parameters, const Value& shard) {
  const auto& strides = shard.at("strides").elements();
  for (size_t i = 0; i < parameters.size(); ++i)
    for (int64_t d = 0; d < parameters.tensor(i).dim(); ++d)
      if (parameters.tensor(i).size(d) > 1 &&
          strides.at(i).elements().at(static_cast<size_t>(d)).as_int() != parameters.tensor(i).stride(d))
        return false;
  return true;
}

/// The intersection of both ranges; of size 0 or less if it is empty.
ShardPiece overlap(const ShardPiece& a, const Value& b) {
  if (static_cast<int64_t>(a.parameter) != b.at("parameter").as_int()) return {};
  const int64_t begin = std::max(a.begin, b.at("begin").as_int());
  const int64_t end = std::min(a.begin + a.size, b.at("begin").as_int() + b.at("size").as_int());
  return {a.parameter, begin, end - begin};
}

bool has_overlap(const ShardedParameters& parameters, const Value& shard) {
  for (const auto& piece : shard.at("pieces").elements())
    for (const auto& own : parameters.pieces())
      if (overlap(own.overall, piece).size > 0) return true;
  return false;
}

/// Elements of a piece's tensor that were found, by piece and name.
using Filled = std::map<std::pair<size_t, std::string>, int64_t>;

void copy_overlap(const ShardedParameters& parameters, const Value& shard, OptimizerState& inner_state,
                  Filled& filled) {
  for (const auto& piece : shard.at("pieces").elements())
    for (size_t i = 0; i < parameters.pieces().size(); ++i) {
      const auto& own = parameters.pieces()[i].overall;
      const auto both = overlap(own, piece);
      if (both.size <= 0) continue;
      auto& values = inner_state.parameters[static_cast<int64_t>(i)];
      const auto& parameter = parameters.tensor(own.parameter);
      for (const auto& [key, value] : piece.at("state").items()) {
        const auto& name = key.as_string();
        const bool is_cut = value.is(Value::Kind::kTensor) && value.tensor().dim() == 1 &&
                            value.tensor().numel() == piece.at("size").as_int();
        if (!is_cut) {
          values[name] = ivalue_of(value);
          continue;
        }
        auto& place = values[name];
        if (!place.isTensor())
          place = parameters.is_whole(own)
                      ? at::empty_strided(parameter.sizes(), parameter.strides(), value.tensor().options())
                      : at::empty({own.size}, value.tensor().options());
        as_row(place.toTensor())
            .narrow(0, both.begin - own.begin, both.size)
            .copy_(value.tensor().narrow(0, both.begin - piece.at("begin").as_int(), both.size));
        filled[{i, name}] += both.size;
      }
    }
}

}  // namespace

void load_shards(Shard& shard, size_t shards, const ReadShard& read) {
  const auto& parameters = shard.parameters();
  OptimizerState inner_state;
  Filled filled;
  for (size_t s = 0; s < shards; ++s) {
    const auto outline = read(s, {.map_location = c10::kMeta});
    check_same_parameters(parameters, outline);
    if (s == 0 && !has_same_layout(parameters, outline)) {  // such as channels last in the state only
      std::vector<Value> all;
      for (size_t i = 0; i < shards; ++i) all.push_back(read(i, {}));
      return load_state(shard, merge_shards(all));
    }
    if (s == 0) {
      inner_state.groups =
          to_optimizer_state(Value::dict({{"state", Value::dict()}, {"param_groups", outline.at("param_groups")}}))
              .groups;
      const size_t expected = shard.outer().param_groups().size();
      if (inner_state.groups.size() != expected)
        throw UsageError(shard.rank(), text("load_shards: the state has ", inner_state.groups.size(),
                                            " parameter groups, expected ", expected));
      for (auto& group : inner_state.groups) group.parameters.clear(), group.names.clear();
      for (size_t i = 0; i < parameters.pieces().size(); ++i)
        inner_state.groups[parameters.group_of(parameters.pieces()[i].overall.parameter)].parameters.push_back(
            static_cast<int64_t>(i));
    }
    if (has_overlap(parameters, outline)) copy_overlap(parameters, read(s, {}), inner_state, filled);
  }
  for (const auto& [place, elements] : filled)
    if (const auto& piece = parameters.pieces()[place.first].overall; elements != piece.size)
      throw CheckpointError(
          shard.rank(), text("load_shards: the shards have ", elements, " elements of '", place.second, "' of ",
                             parameters.name_of(piece.parameter), ", expected ", piece.size, ": a shard is missing"));
  load_inner(shard, inner_state);
}

}  // namespace lockstep::detail
