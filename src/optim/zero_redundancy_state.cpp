// Saving and loading the state of a sharded optimizer: complete, or each rank its own part.

#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/run_and_agree.h"
#include "checkpoint/shards.h"
#include "optim/layout.h"
#include "optim/optimizer_state.h"
#include "optim/zero_redundancy_shard.h"

namespace lockstep {
namespace {

using Values = OptimizerState::Values;

/// Whether a value of a state has one element for each element of the parameter and is divided with it. Others, such as
/// the step count, apply to the whole parameter.
bool is_cut(const c10::IValue& value, at::IntArrayRef sizes) {
  return value.isTensor() && value.toTensor().sizes() == sizes;
}

at::Tensor range_of(const at::Tensor& dense, const detail::ShardPiece& piece) {
  return detail::as_row(dense).narrow(0, piece.begin, piece.size);
}

// --- serialization of a piece's state as nested tuples

c10::IValue pack(const detail::ShardPiece& piece, const Values& values) {
  std::vector<c10::IValue> items{static_cast<int64_t>(piece.parameter), piece.begin, piece.size};
  for (const auto& [name, value] : values) {
    items.emplace_back(name);
    items.push_back(value.isTensor() ? c10::IValue(value.toTensor().cpu()) : value);
  }
  return c10::ivalue::Tuple::create(std::move(items));
}

std::pair<detail::ShardPiece, Values> unpack(const c10::IValue& packed) {
  const auto& items = packed.toTupleRef().elements();
  std::pair<detail::ShardPiece, Values> result{
      {static_cast<size_t>(items[0].toInt()), items[1].toInt(), items[2].toInt()}, {}};
  for (size_t i = 3; i < items.size(); i += 2) result.second[items[i].toStringRef()] = items[i + 1];
  return result;
}

}  // namespace

void ZeroRedundancyOptimizerBase::Shard::check_complete() const {
  if (step_incomplete_)
    throw UsageError(group_.rank(),
                     "ZeroRedundancyOptimizer: the last step did not finish, so the ranks' shares may be of "
                     "different steps; resume from the last checkpoint");
}

/// Returns the groups with the numbers and names of all parameters, instead of this rank's pieces.
std::vector<OptimizerState::Group> ZeroRedundancyOptimizerBase::Shard::complete_groups(
    std::vector<OptimizerState::Group> groups) const {
  for (auto& group : groups) group.parameters.clear();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto& group = groups[group_of_[i]];
    group.parameters.push_back(static_cast<int64_t>(i));
    if (i < names_.size()) group.names.push_back(names_[i]);
  }
  return groups;
}

OptimizerState ZeroRedundancyOptimizerBase::Shard::consolidate(int dst) const {
  detail::run_and_agree(group_, [&] { check_complete(); });
  group_.synchronize();
  take_options();
  auto mine = detail::view_state(*inner_);
  std::vector<c10::IValue> packed;
  for (size_t i = 0; i < shares_.size(); ++i)
    if (const auto found = mine.parameters.find(static_cast<int64_t>(i)); found != mine.parameters.end())
      packed.push_back(pack(shares_[i].overall, found->second));
  const auto all = group_.gather_object(c10::ivalue::Tuple::create(std::move(packed)), dst);
  if (group_.rank() != dst) return {};

  OptimizerState state{.groups = complete_groups(std::move(mine.groups))};
  for (const auto& rank : all)
    for (const auto& item : rank.toTupleRef().elements()) {
      const auto [piece, values] = unpack(item);
      const auto& parameter = parameters_[piece.parameter];
      auto& together = state.parameters[static_cast<int64_t>(piece.parameter)];
      for (const auto& [name, value] : values) {
        if (is_whole(piece) || !is_cut(value, {piece.size})) {
          together[name] = value;
          continue;
        }
        auto& whole = together[name];
        if (!whole.isTensor())
          whole = at::empty_strided(parameter.sizes(), parameter.strides(), value.toTensor().options());
        range_of(whole.toTensor(), piece).copy_(value.toTensor());
      }
    }
  return state;
}

void ZeroRedundancyOptimizerBase::Shard::load(const OptimizerState& state) {
  detail::check_fits(*outer_, state);
  std::vector<int64_t> numbers;  // of our parameters in the state
  std::vector<std::string> names;
  for (const auto& group : state.groups) {
    numbers.insert(numbers.end(), group.parameters.begin(), group.parameters.end());
    names.insert(names.end(), group.names.begin(), group.names.end());
  }
  check_names(names);
  OptimizerState mine;
  for (const auto& group : state.groups) mine.groups.push_back({.options = group.options});
  for (size_t i = 0; i < shares_.size(); ++i) {
    const auto& [memory, here, piece, group] = shares_[i];
    mine.groups[group].parameters.push_back(static_cast<int64_t>(i));
    const auto found = state.parameters.find(numbers[piece.parameter]);
    if (found == state.parameters.end()) continue;
    const auto& parameter = parameters_[piece.parameter];
    for (const auto& [name, value] : found->second)
      mine.parameters[static_cast<int64_t>(i)][name] =
          is_whole(piece) || !is_cut(value, parameter.sizes())
              ? value
              : c10::IValue(range_of(detail::laid_out_as(parameter, value.toTensor()), piece));
  }
  load_inner(mine);
}

void ZeroRedundancyOptimizerBase::Shard::check_names(const std::vector<std::string>& names) const {
  for (size_t i = 0; i < std::min(names.size(), names_.size()); ++i)
    if (names[i] != names_[i])
      throw UsageError(group_.rank(),
                       text("load_state_dict: parameter ", i, " is '", names_[i], "' here and '", names[i],
                            "' in the state; the state belongs to another model, or its order differs"));
}

void ZeroRedundancyOptimizerBase::Shard::load_inner(const OptimizerState& mine) {
  lockstep::load_state_dict(*inner_, mine);
  for (size_t g = 0; g < inner_->param_groups().size(); ++g)
    outer_->param_groups()[g].set_options(inner_->param_groups()[g].options().clone());
  step_incomplete_ = false;
}

// --- shards, in the format of checkpoint/shards.h

Value ZeroRedundancyOptimizerBase::Shard::save_shard() const {
  check_complete();
  take_options();
  const auto mine = detail::view_state(*inner_);
  auto sizes = Value::list(), strides = Value::list(), pieces = Value::list();
  for (const auto& parameter : parameters_) {
    sizes.elements().push_back(Value::list({parameter.sizes().begin(), parameter.sizes().end()}));
    strides.elements().push_back(Value::list({parameter.strides().begin(), parameter.strides().end()}));
  }
  for (size_t i = 0; i < shares_.size(); ++i) {
    const auto found = mine.parameters.find(static_cast<int64_t>(i));
    if (found == mine.parameters.end()) continue;
    const auto& piece = shares_[i].overall;
    const auto& parameter = parameters_[piece.parameter];
    auto state = Value::dict();
    for (const auto& [name, value] : found->second) {
      const bool is_one_each = value.isTensor() && value.toTensor().numel() == piece.size && name != "step";
      state.set(name, is_one_each && is_whole(piece)
                          ? Value(detail::as_row(detail::laid_out_as(parameter, value.toTensor())))
                          : detail::value_of(value));
    }
    pieces.elements().push_back(Value::dict(
        {{"parameter", piece.parameter}, {"begin", piece.begin}, {"size", piece.size}, {"state", std::move(state)}}));
  }
  const auto groups = to_value({.groups = complete_groups(mine.groups)}).at("param_groups");
  return Value::dict({{"param_groups", groups},
                      {"sizes", std::move(sizes)},
                      {"strides", std::move(strides)},
                      {"pieces", std::move(pieces)}});
}

void ZeroRedundancyOptimizerBase::Shard::check_same_parameters(const Value& shard) const {
  const auto& sizes = shard.at("sizes").elements();
  if (sizes.size() != parameters_.size())
    throw UsageError(group_.rank(), text("load_shards: the state has ", sizes.size(), " parameters, expected ",
                                         parameters_.size(), "; build the model that was saved"));
  for (size_t i = 0; i < sizes.size(); ++i)
    if (sizes[i] != Value::list({parameters_[i].sizes().begin(), parameters_[i].sizes().end()}))
      throw UsageError(group_.rank(), text("load_shards: ", name_of(i), " is ", parameters_[i].sizes(), " here and ",
                                           sizes[i], " in the state; build the model that was saved"));
  std::vector<std::string> names;
  for (const auto& group : shard.at("param_groups").elements())
    if (const auto* listed = group.find("param_names"))
      for (const auto& name : listed->elements()) names.push_back(name.as_string());
  check_names(names);
  for (const auto& piece : shard.at("pieces").elements()) {
    const auto parameter = piece.at("parameter").as_int(), begin = piece.at("begin").as_int();
    const auto size = piece.at("size").as_int();
    const auto in = parameter < 0 || parameter >= static_cast<int64_t>(parameters_.size())
                        ? -1
                        : parameters_[static_cast<size_t>(parameter)].numel();
    if (begin < 0 || size < 0 || size > in || begin > in - size)
      throw CheckpointError(group_.rank(), text("load_shards: a shard has ", size, " elements from ", begin,
                                                " of parameter ", parameter, ", which has ", in, " elements"));
  }
}

/// Whether ranges of elements in memory order are the same elements here and in the state.
bool ZeroRedundancyOptimizerBase::Shard::has_same_layout(const Value& shard) const {
  const auto& strides = shard.at("strides").elements();
  for (size_t i = 0; i < parameters_.size(); ++i)
    for (int64_t d = 0; d < parameters_[i].dim(); ++d)
      if (parameters_[i].size(d) > 1 &&
          strides.at(i).elements().at(static_cast<size_t>(d)).as_int() != parameters_[i].stride(d))
        return false;
  return true;
}

namespace {

/// The part of both ranges that is the same; of size 0 or less if there is none.
detail::ShardPiece overlap(const detail::ShardPiece& a, const Value& b) {
  if (static_cast<int64_t>(a.parameter) != b.at("parameter").as_int()) return {};
  const int64_t begin = std::max(a.begin, b.at("begin").as_int());
  const int64_t end = std::min(a.begin + a.size, b.at("begin").as_int() + b.at("size").as_int());
  return {a.parameter, begin, end - begin};
}

}  // namespace

bool ZeroRedundancyOptimizerBase::Shard::has_overlap(const Value& shard) const {
  for (const auto& piece : shard.at("pieces").elements())
    for (const auto& share : shares_)
      if (overlap(share.overall, piece).size > 0) return true;
  return false;
}

void ZeroRedundancyOptimizerBase::Shard::take_overlap(const Value& shard, OptimizerState& mine, Filled& filled) const {
  for (const auto& piece : shard.at("pieces").elements())
    for (size_t i = 0; i < shares_.size(); ++i) {
      const auto& own = shares_[i].overall;
      const auto both = overlap(own, piece);
      if (both.size <= 0) continue;
      auto& values = mine.parameters[static_cast<int64_t>(i)];
      const auto& parameter = parameters_[own.parameter];
      for (const auto& [key, value] : piece.at("state").items()) {
        const auto& name = key.as_string();
        const bool is_cut = value.is(Value::Kind::kTensor) && value.tensor().dim() == 1 &&
                            value.tensor().numel() == piece.at("size").as_int();
        if (!is_cut) {
          values[name] = detail::ivalue_of(value);
          continue;
        }
        auto& place = values[name];
        if (!place.isTensor())
          place = is_whole(own) ? at::empty_strided(parameter.sizes(), parameter.strides(), value.tensor().options())
                                : at::empty({own.size}, value.tensor().options());
        detail::as_row(place.toTensor())
            .narrow(0, both.begin - own.begin, both.size)
            .copy_(value.tensor().narrow(0, both.begin - piece.at("begin").as_int(), both.size));
        filled[{i, name}] += both.size;
      }
    }
}

void ZeroRedundancyOptimizerBase::Shard::load_shards(size_t shards, const ReadShard& read) {
  OptimizerState mine;
  Filled filled;
  for (size_t s = 0; s < shards; ++s) {
    const auto outline = read(s, {.map_location = c10::kMeta});
    check_same_parameters(outline);
    if (s == 0 && !has_same_layout(outline)) {  // such as channels last there and not here
      std::vector<Value> all;
      for (size_t i = 0; i < shards; ++i) all.push_back(read(i, {}));
      return load(to_optimizer_state(detail::merge_shards(all)));
    }
    if (s == 0) {
      mine.groups =
          to_optimizer_state(Value::dict({{"state", Value::dict()}, {"param_groups", outline.at("param_groups")}}))
              .groups;
      if (mine.groups.size() != outer_->param_groups().size())
        throw UsageError(group_.rank(), text("load_shards: the state has ", mine.groups.size(),
                                             " parameter groups, expected ", outer_->param_groups().size()));
      for (auto& group : mine.groups) group.parameters.clear(), group.names.clear();
      for (size_t i = 0; i < shares_.size(); ++i)
        mine.groups[shares_[i].group].parameters.push_back(static_cast<int64_t>(i));
    }
    if (has_overlap(outline)) take_overlap(read(s, {}), mine, filled);
  }
  for (const auto& [place, elements] : filled)
    if (const auto& share = shares_[place.first].overall; elements != share.size)
      throw CheckpointError(group_.rank(),
                            text("load_shards: the shards have ", elements, " elements of '", place.second, "' of ",
                                 name_of(share.parameter), ", expected ", share.size, ": a shard is missing"));
  load_inner(mine);
}

}  // namespace lockstep
