#include <lockstep/zero_redundancy_optimizer.h>

#include <algorithm>
#include <map>
#include <set>

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/capture.h"
#include "comm/join.h"
#include "optim/layout.h"
#include "optim/optimizer_state.h"
#include "optim/sharded_memory.h"

// Overview.
//
// The ZeroRedundancyOptimizer itself ("outer") holds all parameters and their groups, but no state. At construction,
// Shard moves the parameters of each dtype into one ShardedMemory, a buffer with one share per rank. An "inner"
// optimizer of the user's type holds this rank's pieces of parameters, as views of that buffer, so its state covers
// only the share.
//
// step() copies the options of the outer groups to the inner ones, assigns each piece its range of the gradient, steps
// the inner optimizer and all-gathers the shares. consolidate() gathers all ranks' pieces of state on one rank and
// assembles them to the state of whole parameters; load() cuts this rank's pieces out of such a state. Both therefore
// work with any number of ranks.
//
// A captured step holds the Shard by shared_ptr, because it may outlive the optimizer; release() makes its replay fail.
// If a step fails between the inner step and the all-gather, ranks may hold shares of different steps; step_incomplete_
// records this, and consolidate() then refuses to save.

namespace lockstep {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
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

/// This rank's share of the parameters and the inner optimizer. Captured steps may keep it alive after the optimizer is
/// destroyed.
class ZeroRedundancyOptimizerBase::Shard {
 public:
  Shard(Optimizer& outer, std::vector<std::string> names, ProcessGroup group, ShardBy by, const Make& make,
        void (*before_replay)(Optimizer&));

  void release() { outer_ = nullptr; }
  const ProcessGroup& group() const { return group_; }
  Optimizer& inner() const { return *inner_; }

  void check_unchanged() const;
  void do_as(int rank) const;
  void step();
  void take_options() const;
  void before_replay() const {
    take_options();
    before_replay_(*inner_);
  }

  OptimizerState consolidate(int dst) const;
  void load(const OptimizerState& state);
  Value save_shard() const;
  void load_shards(size_t shards, const ReadShard& read);

 private:
  struct Memory {
    std::vector<size_t> members;  // indices into parameters_
    detail::ShardedMemory memory;
  };
  /// One parameter of the inner optimizer.
  struct Share {
    size_t memory;               // index into memories_
    detail::ShardPiece here;     // its parameter is an index into Memory::members
    detail::ShardPiece overall;  // its parameter is an index into parameters_
    size_t group;
  };

  std::string name_of(size_t parameter) const;
  std::string what_is_wrong() const;
  void check_parameters() const;
  void move_parameters(ShardBy by);
  void check_complete() const;
  void load_inner(const OptimizerState& mine);
  std::vector<OptimizerState::Group> complete_groups(std::vector<OptimizerState::Group> groups) const;
  void check_names(const std::vector<std::string>& names) const;
  void check_same_parameters(const Value& shard) const;
  void take_overlap(const Value& shard, OptimizerState& mine) const;
  bool has_overlap(const Value& shard) const;
  bool is_whole(const detail::ShardPiece& piece) const { return piece.size == parameters_[piece.parameter].numel(); }

  Optimizer* outer_;  // null after release()
  const std::vector<std::string> names_;
  const ProcessGroup group_;
  void (*const before_replay_)(Optimizer&);
  std::vector<at::Tensor> parameters_;  // of all groups, concatenated
  std::vector<size_t> group_of_;        // by parameter
  std::vector<Memory> memories_;        // by dtype
  std::vector<Share> shares_;           // in the order of the inner optimizer's parameters
  std::unique_ptr<Optimizer> inner_;
  bool step_incomplete_ = false;  // a step has started but did not finish
};

ZeroRedundancyOptimizerBase::Shard::Shard(Optimizer& outer, std::vector<std::string> names, ProcessGroup group,
                                          ShardBy by, const Make& make, void (*before_replay)(Optimizer&))
    : outer_(&outer), names_(std::move(names)), group_(std::move(group)), before_replay_(before_replay) {
  for (size_t g = 0; g < outer.param_groups().size(); ++g)
    for (const auto& parameter : outer.param_groups()[g].params()) {
      parameters_.push_back(parameter);
      group_of_.push_back(g);
    }
  check_parameters();
  move_parameters(by);

  std::vector<OptimizerParamGroup> groups;
  for (size_t g = 0; g < outer.param_groups().size(); ++g) {
    std::vector<at::Tensor> values;
    for (const auto& share : shares_)
      if (share.group == g) values.push_back(memories_[share.memory].memory.values(share.here));
    groups.emplace_back(std::move(values), outer.param_groups()[g].options().clone());
  }
  inner_ = make(std::move(groups));
}

std::string ZeroRedundancyOptimizerBase::Shard::name_of(size_t parameter) const {
  if (parameter < names_.size()) return text("parameter '", names_[parameter], "'");
  return text("parameter ", parameter);
}

/// Describes what is wrong with this rank's parameters, for an error message; empty if nothing is.
std::string ZeroRedundancyOptimizerBase::Shard::what_is_wrong() const {
  if (parameters_.empty()) return "there are no parameters";
  std::set<const c10::TensorImpl*> seen;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = parameters_[i];
    const auto about = text(name_of(i), ", of sizes ", parameter.sizes(), ", ");
    if (parameter.layout() != c10::kStrided)
      return text(about, "has layout ", parameter.layout(), "; only dense parameters can be divided");
    if (parameter.device() != group_.device())
      return text(about, "is on ", parameter.device(), ", but the group's device is ", group_.device(),
                  "; move the model there first");
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second)
      return text(about, "is listed twice; ddp.parameters() lists each once");
  }
  return {};
}

// Compares the parameters of all ranks: ranks that disagree would assign shares to the wrong parameters. Collective;
// throws on all ranks or on none.
void ZeroRedundancyOptimizerBase::Shard::check_parameters() const {
  if (!group_.contains_me())
    throw UsageError(text("ZeroRedundancyOptimizer: this process is not in group ", group_.name(),
                          "; pass a group that contains it"));
  const auto wrong = what_is_wrong();
  std::vector<c10::IValue> facts{wrong};
  if (wrong.empty())
    for (size_t i = 0; i < parameters_.size(); ++i)
      facts.emplace_back(text(name_of(i), " of group ", group_of_[i], " is ", parameters_[i].sizes(), " with strides ",
                              parameters_[i].strides(), ", ", parameters_[i].scalar_type()));
  const auto all = group_.all_gather_object(c10::ivalue::Tuple::create(std::move(facts)));
  for (int rank = 0; rank < group_.size(); ++rank)
    if (const auto& theirs = all[rank].toTupleRef().elements()[0].toStringRef(); !theirs.empty())
      throw UsageError(group_.rank(), text("ZeroRedundancyOptimizer: on rank ", rank, ", ", theirs));
  const auto& first = all[0].toTupleRef().elements();
  for (int rank = 1; rank < group_.size(); ++rank) {
    const auto& theirs = all[rank].toTupleRef().elements();
    for (size_t i = 0; i < std::max(first.size(), theirs.size()); ++i) {
      auto fact = [&](const auto& list) {
        return i < list.size() ? list[i].toStringRef() : text("there are ", list.size() - 1, " parameters");
      };
      if (fact(first) != fact(theirs))
        throw MismatchError(group_.rank(), text("ZeroRedundancyOptimizer: on rank 0 ", fact(first), ", on rank ", rank,
                                                " ", fact(theirs), "; build the same model on every rank"));
    }
  }
}

void ZeroRedundancyOptimizerBase::Shard::move_parameters(ShardBy by) {
  std::map<at::ScalarType, std::vector<size_t>> by_dtype;
  for (size_t i = 0; i < parameters_.size(); ++i) by_dtype[parameters_[i].scalar_type()].push_back(i);
  for (const auto& [dtype, members] : by_dtype) {
    std::vector<at::Tensor> alike;
    for (size_t i : members) alike.push_back(parameters_[i]);
    memories_.push_back({members, detail::ShardedMemory(group_, std::move(alike), by)});
    for (const auto& piece : memories_.back().memory.pieces()) {
      const size_t parameter = members[piece.parameter];
      shares_.push_back({memories_.size() - 1, piece, {parameter, piece.begin, piece.size}, group_of_[parameter]});
    }
  }
  std::sort(shares_.begin(), shares_.end(),
            [](const Share& a, const Share& b) { return a.overall.parameter < b.overall.parameter; });
}

// Not collective. Throws on all ranks or on none if all ranks run the same program.
void ZeroRedundancyOptimizerBase::Shard::check_unchanged() const {
  size_t count = 0;
  for (const auto& group : outer_->param_groups()) count += group.params().size();
  if (count != parameters_.size())
    throw UsageError(group_.rank(), text("ZeroRedundancyOptimizer was constructed with ", parameters_.size(),
                                         " parameters and has ", count, " now; pass all groups to its constructor"));
  for (const auto& [members, memory] : memories_)
    for (size_t i = 0; i < members.size(); ++i)
      if (!memory.restore_storage(i))
        throw UsageError(
            group_.rank(),
            text(name_of(members[i]), " has become ", parameters_[members[i]].sizes(), ' ',
                 parameters_[members[i]].scalar_type(), " on ", parameters_[members[i]].device(),
                 " after ZeroRedundancyOptimizer was constructed; construct the optimizer after the model ",
                 "is final"));
}

// Takes the learning rates of `rank`, which still has inputs in a join, and adds gradients of zero for parameters that
// have a gradient there but not here. A rank without inputs does not run the loop that sets them. Collective.
void ZeroRedundancyOptimizerBase::Shard::do_as(int rank) const {
  auto& groups = outer_->param_groups();
  std::vector<double> here;
  for (const auto& group : groups) here.push_back(group.options().get_lr());
  for (const auto& parameter : parameters_) here.push_back(parameter.grad().defined());
  auto there = at::tensor(here, at::kDouble).to(group_.device());
  group_.broadcast(there, rank);
  if (group_.rank() == rank) return;
  there = there.cpu();
  const double* value = there.data_ptr<double>();
  for (auto& group : groups) group.options().set_lr(*value++);
  for (const auto& parameter : parameters_) {
    auto& gradient = parameter.mutable_grad();
    if (*value++ != 0 && !gradient.defined()) gradient = at::zeros_like(parameter);
  }
}

void ZeroRedundancyOptimizerBase::Shard::take_options() const {
  if (!outer_)
    throw UsageError(
        "the captured step cannot be replayed: its ZeroRedundancyOptimizer was destroyed; create a new CapturedStep");
  for (size_t g = 0; g < inner_->param_groups().size(); ++g)
    inner_->param_groups()[g].set_options(outer_->param_groups()[g].options().clone());
}

void ZeroRedundancyOptimizerBase::Shard::step() {
  take_options();
  size_t next = 0;
  for (auto& group : inner_->param_groups())
    for (auto& values : group.params()) {
      const auto& share = shares_[next++];
      values.mutable_grad() = memories_[share.memory].memory.gradient(share.here);
    }
  step_incomplete_ = !detail::is_capturing(group_.device());
  inner_->step();
  for (auto& group : inner_->param_groups())
    for (auto& values : group.params()) values.mutable_grad().reset();  // zero_grad() can then free the gradients
  for (const auto& [members, memory] : memories_) memory.gather();
  step_incomplete_ = false;
}

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
  check_complete();
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

void ZeroRedundancyOptimizerBase::Shard::take_overlap(const Value& shard, OptimizerState& mine) const {
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
      }
    }
}

void ZeroRedundancyOptimizerBase::Shard::load_shards(size_t shards, const ReadShard& read) {
  OptimizerState mine;
  for (size_t s = 0; s < shards; ++s) {
    const auto outline = read(s, {.map_location = c10::kMeta});
    check_same_parameters(outline);
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
    if (has_overlap(outline)) take_overlap(read(s, {}), mine);
  }
  load_inner(mine);
}

ZeroRedundancyOptimizerBase::ZeroRedundancyOptimizerBase(std::vector<OptimizerParamGroup> groups,
                                                         std::vector<std::string> names,
                                                         std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                                         ProcessGroup group, const ZeroRedundancyOptions& options,
                                                         ShardBy shard_by, const Make& make,
                                                         void (*before_replay)(Optimizer&))
    : Optimizer(std::move(groups), std::move(defaults)),
      before_step_(options.before_step),
      shard_(std::make_shared<Shard>(*this, std::move(names), std::move(group), shard_by, make, before_replay)) {}

ZeroRedundancyOptimizerBase::~ZeroRedundancyOptimizerBase() {
  shard_->release();
}

at::Tensor ZeroRedundancyOptimizerBase::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode enabled(true);
    loss = closure();
  }
  const c10::NoGradGuard no_grad;
  shard_->check_unchanged();
  if (join_) shard_->do_as(join_->round().last_rank());
  if (before_step_) before_step_();
  if (detail::is_capturing(shard_->group().device()))
    detail::Recording::before_replay([shard = shard_] { shard->take_options(); });
  shard_->step();
  return loss;
}

OptimizerState ZeroRedundancyOptimizerBase::consolidated_state_dict(int dst) const {
  return shard_->consolidate(dst);
}

void ZeroRedundancyOptimizerBase::load_state_dict(const OptimizerState& state) {
  shard_->load(state);
}

Value ZeroRedundancyOptimizerBase::state_dict() const {
  return to_value(shard_->consolidate(0));
}

void ZeroRedundancyOptimizerBase::load_state_dict(const Value& value) {
  shard_->load(to_optimizer_state(value));
}

Value ZeroRedundancyOptimizerBase::shard_state_dict() const {
  return shard_->save_shard();
}

void ZeroRedundancyOptimizerBase::load_shards(size_t shards, const ReadShard& read) {
  shard_->load_shards(shards, read);
}

void ZeroRedundancyOptimizerBase::save(torch::serialize::OutputArchive&) const {
  throw UsageError(
      "ZeroRedundancyOptimizer: this rank has only a share of the state; call consolidated_state_dict() on all ranks");
}

void ZeroRedundancyOptimizerBase::load(torch::serialize::InputArchive&) {
  throw UsageError(
      "ZeroRedundancyOptimizer: load() is not supported; call load_state_dict() with the consolidated state");
}

int64_t ZeroRedundancyOptimizerBase::state_bytes() const {
  return detail::state_bytes(shard_->inner());
}

void ZeroRedundancyOptimizerBase::before_replay() {
  shard_->before_replay();
}

ProcessGroup ZeroRedundancyOptimizerBase::join_group() const {
  return shard_->group();
}

void ZeroRedundancyOptimizerBase::enter_join(std::shared_ptr<detail::JoinContext> context, bool is_first) {
  if (is_first)
    throw UsageError(shard_->group().rank(),
                     "join: the optimizer is listed before the wrapper; call join({&ddp, &optimizer}, ...)");
  join_ = std::move(context);
}

// A rank without inputs must step as well: the other ranks wait for its share of the parameters.
void ZeroRedundancyOptimizerBase::shadow(const detail::JoinRound& round) {
  if (round.is_synchronized) step();
}

void ZeroRedundancyOptimizerBase::copy_state_from(int) {}

void ZeroRedundancyOptimizerBase::leave_join() noexcept {
  join_.reset();
}

}  // namespace lockstep
