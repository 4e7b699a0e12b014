#include <lockstep/zero_redundancy_optimizer.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <unordered_map>
#include <unordered_set>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/join.h"
#include "comm/run_and_agree.h"
#include "optim/gradient_clipping.h"
#include "optim/optimizer_state.h"
#include "optim/zero/shard.h"
#include "optim/zero/shard_state.h"
#include "optim/zero/sharded_gradients.h"
#include "optim/zero/undo.h"
#include "optim/zero/update_in_backward.h"
#include "optim/zero/update_in_step.h"
#include "optim/zero/update_of_shared_parameters.h"
#include "parallel/ddp/ddp_state.h"

// Overview.
//
// The Shard (zero/shard.h) divides the parameters between the ranks: ShardedParameters moves the parameters of each
// dtype into one ShardedMemory, a buffer with one share per rank, and an inner optimizer of the user's type has this
// rank's pieces, as views of that buffer, so its state covers only the share.
//
// An UpdateStrategy makes the steps. There is one class for each way in which gradients and updates are exchanged:
// UpdateInStep (Overlap::kNone), ShardedGradients (kGradients), UpdateInBackward (kUpdate) and UpdateOfSharedParameters
// (kUpdate with share_parameters). All classes except UpdateInStep implement the BucketUpdate of the wrapper's reducer.
//
// shard_state.h saves and loads: it gathers all ranks' pieces of state on one rank and assembles them to the state of
// whole parameters, or cuts this rank's pieces out of such a state. Both therefore work with any number of ranks.
//
// If a step fails between the inner step and the all-gather, ranks may hold shares of different steps. The Shard
// records this, and the state can no longer be saved.

namespace lockstep {
namespace {

void check_options(const ZeroRedundancyOptions& options, const ProcessGroup& group, bool has_wrapper) {
  const auto refuse = [&](const char* why) { throw UsageError(group.rank(), text("ZeroRedundancyOptimizer: ", why)); };
  if (options.overlap == Overlap::kNone) return;
  if (!has_wrapper)
    refuse(
        "the option overlap needs the DistributedDataParallel that reduces the gradients; pass it to the constructor");
  if (options.before_step)
    refuse(
        "the option before_step cannot be combined with overlap, because the parameters have no gradients between "
        "backward and step(); with Overlap::kGradients, call optimizer.clip_grad_norm_() before step()");
  if (options.share_parameters && options.overlap == Overlap::kGradients)
    refuse(
        "the option share_parameters cannot be combined with Overlap::kGradients; leave overlap out, and step() "
        "updates the shared parameters");
}

/// Throws MismatchError on all ranks if their options differ. Collective.
void check_same_options(const ZeroRedundancyOptions& options, ShardBy shard_by, const ProcessGroup& group) {
  constexpr std::array kOverlaps{"kNone", "kGradients", "kUpdate"};
  const auto own_options = text("overlap is ", kOverlaps.at(static_cast<size_t>(options.overlap)), ", shard_by is ",
                                shard_by == ShardBy::kElements ? "kElements" : "kParameters",
                                " and share_parameters is ", options.share_parameters ? "true" : "false");
  const auto all = group.all_gather_object(own_options, detail::kInConstructor);
  const auto& first = all[0].toStringRef();
  for (size_t rank = 1; rank < all.size(); ++rank)
    if (const auto& other_options = all[rank].toStringRef(); other_options != first)
      throw MismatchError(group.rank(), text("ZeroRedundancyOptimizer: ", first, " on rank 0, but ", other_options,
                                             " on rank ", rank, "; pass the same options on every rank"));
}

/// Throws UsageError for a parameter that is trained and that the wrapper does not reduce.
void check_reduced(const NamedTensors& not_reduced, int rank) {
  for (const auto& [name, parameter] : not_reduced)
    if (parameter.requires_grad())
      throw UsageError(rank, text("ZeroRedundancyOptimizer: the wrapper does not reduce the gradient of ", name,
                                  ": the parameter is not in the wrapped model, is in the wrapper's option ignore, or "
                                  "was frozen when the model was wrapped; give it an optimizer of its own, or freeze "
                                  "it with requires_grad_(false)"));
}

/// Throws UsageError for a complex parameter that is trained: its step would throw only on the ranks that have a part
/// of the parameter.
void check_fusable(const std::vector<torch::optim::OptimizerParamGroup>& groups, const std::vector<std::string>& names,
                   int rank) {
  size_t index = 0;
  for (const auto& group : groups)
    for (const auto& parameter : group.params()) {
      const auto name = index < names.size() && !names[index].empty() ? text("parameter '", names[index], "'")
                                                                      : text("parameter ", index);
      if (parameter.requires_grad() && parameter.is_complex())
        throw UsageError(rank, text("ZeroRedundancyOptimizer: ", name, " has dtype ", parameter.scalar_type(),
                                    ", but a fused optimizer updates Float, Double, Half and BFloat16; use another "
                                    "inner optimizer, or keep the parameter as real numbers (torch::view_as_real)"));
      ++index;
    }
}

/// No names if one is missing: a saved state has names for all parameters or for none.
std::vector<std::string> all_or_none(std::vector<std::string> names) {
  if (std::find(names.begin(), names.end(), "") != names.end()) names.clear();
  return names;
}

}  // namespace

// --- construction

ZeroRedundancyOptimizerBase::Parameters ZeroRedundancyOptimizerBase::parameters_of(
    std::vector<std::pair<std::string, at::Tensor>> parameters, ProcessGroup group) {
  Parameters result{{}, {}, std::move(group)};
  std::vector<at::Tensor> tensors;
  for (auto& [name, tensor] : parameters) {
    tensors.push_back(tensor);
    result.names.push_back(std::move(name));
  }
  result.groups.emplace_back(std::move(tensors));
  return result;
}

ZeroRedundancyOptimizerBase::Parameters ZeroRedundancyOptimizerBase::parameters_of(
    DistributedDataParallelBase& wrapper) {
  NamedTensors parameters;
  for (const auto& [name, tensor] : detail::ddp_state(wrapper).wrapped().parameters())
    parameters.emplace_back(name, tensor);
  auto result = parameters_of(std::move(parameters), wrapper.process_group());
  result.wrapper = &wrapper;
  return result;
}

ZeroRedundancyOptimizerBase::Parameters ZeroRedundancyOptimizerBase::parameters_of(
    std::vector<torch::optim::OptimizerParamGroup> groups, DistributedDataParallelBase& wrapper) {
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  for (const auto& [name, tensor] : wrapper.named_parameters()) names.emplace(tensor.unsafeGetTensorImpl(), name);
  Parameters result{std::move(groups), {}, wrapper.process_group(), &wrapper};
  for (const auto& group : result.groups)
    for (const auto& parameter : group.params()) {
      const auto found = names.find(parameter.unsafeGetTensorImpl());
      result.names.push_back(found != names.end() ? found->second : "");
    }
  return result;
}

/// Checks what can be checked before the parameters are moved. Returns the parameters that the wrapper does not reduce.
/// Collective. Throws on all ranks.
NamedTensors ZeroRedundancyOptimizerBase::check(const Parameters& parameters, const ZeroRedundancyOptions& options,
                                                ShardBy shard_by, bool is_fused) const {
  const auto& group = parameters.group;
  if (!group.contains_me())
    throw UsageError(text("ZeroRedundancyOptimizer: this process is not in group ", group.name(),
                          "; pass a group that contains it"));
  check_same_options(options, shard_by, group);
  NamedTensors not_reduced;
  detail::run_and_agree(group, [&] {
    check_options(options, group, parameters.wrapper != nullptr);
    if (is_fused) check_fusable(param_groups(), parameters.names, group.rank());
    if (!parameters.wrapper) return;
    const auto& reducer = detail::ddp_state(*parameters.wrapper).reducer();
    if (options.overlap != Overlap::kNone) reducer.check_can_update();
    std::unordered_set<const c10::TensorImpl*> reduced;
    for (const auto& [name, tensor] : reducer.parameters()) reduced.insert(tensor.unsafeGetTensorImpl());
    size_t index = 0;
    for (const auto& param_group : param_groups())
      for (const auto& parameter : param_group.params()) {
        const auto& name = parameters.names[index];
        if (!reduced.contains(parameter.unsafeGetTensorImpl()))
          not_reduced.emplace_back(name.empty() ? text("parameter ", index) : text("parameter '", name, "'"),
                                   parameter);
        ++index;
      }
    check_reduced(not_reduced, group.rank());
  });
  return not_reduced;
}

ZeroRedundancyOptimizerBase::ZeroRedundancyOptimizerBase(Parameters parameters,
                                                         std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                                         const ZeroRedundancyOptions& options, ShardBy shard_by,
                                                         detail::InnerOptimizer inner)
    : Optimizer(std::move(parameters.groups), std::move(defaults)),
      before_step_(options.before_step),
      not_reduced_(check(parameters, options, shard_by, inner.is_fused)),
      shard_(std::make_shared<detail::Shard>(*this, all_or_none(std::move(parameters.names)), parameters.group,
                                             shard_by,
                                             options.share_parameters ? detail::ShardedParameters::Buffer::kShared
                                                                      : detail::ShardedParameters::Buffer::kOwn,
                                             std::move(inner))) {
  if (options.overlap == Overlap::kNone) {
    strategy_ = std::make_shared<detail::UpdateInStep>(shard_);
    return;
  }
  std::shared_ptr<detail::OverlappedUpdate> update;
  if (options.share_parameters)
    update = std::make_shared<detail::UpdateOfSharedParameters>(shard_);
  else if (options.overlap == Overlap::kUpdate)
    update = std::make_shared<detail::UpdateInBackward>(shard_);
  else
    update = std::make_shared<detail::ShardedGradients>(shard_);
  detail::ddp_state(*parameters.wrapper).reducer().set_update(update);
  strategy_ = std::move(update);
}

ZeroRedundancyOptimizerBase::~ZeroRedundancyOptimizerBase() {
  shard_->release();
}

// --- steps

at::Tensor ZeroRedundancyOptimizerBase::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode enabled(true);
    loss = closure();
  }
  step_shard({});
  return loss;
}

void ZeroRedundancyOptimizerBase::step_unless(const at::Tensor& skip) {
  if (join_)
    throw UsageError(
        shard_->rank(),
        "ZeroRedundancyOptimizer: a GradScaler cannot be used in a join, because a rank without inputs would "
        "step with scaled gradients; use bfloat16, which needs no scaler");
  step_shard(skip);
}

void ZeroRedundancyOptimizerBase::step_shard(const at::Tensor& skip) {
  const c10::NoGradGuard no_grad;
  check_reduced(not_reduced_, shard_->rank());
  strategy_->begin_step();
  if (join_) copy_rates_of(join_->round().last_rank());
  if (before_step_) before_step_();
  strategy_->step(skip);
}

// A rank without inputs in a join does not run the loop that sets learning rates. It copies the rates of `rank`, which
// still has inputs, and adds gradients of zero for parameters that have a gradient on `rank` only. Collective.
void ZeroRedundancyOptimizerBase::copy_rates_of(int rank) const {
  const auto& group = shard_->group();
  auto& groups = shard_->outer().param_groups();
  std::vector<double> own;
  for (const auto& options : groups) own.push_back(options.options().get_lr());
  for (size_t i = 0; i < shard_->parameters().size(); ++i)
    own.push_back(shard_->parameters().tensor(i).grad().defined());
  auto received = at::tensor(own, at::kDouble).to(group.device());
  group.broadcast(received, rank);
  if (group.rank() == rank) return;
  received = received.cpu();
  const double* value = received.data_ptr<double>();
  for (auto& options : groups) options.options().set_lr(*value++);
  for (size_t i = 0; i < shard_->parameters().size(); ++i) {
    const auto& parameter = shard_->parameters().tensor(i);
    auto& gradient = parameter.mutable_grad();
    if (*value++ != 0 && !gradient.defined()) gradient = at::zeros_like(parameter);
  }
}

std::optional<std::vector<at::Tensor>> ZeroRedundancyOptimizerBase::sharded_gradients() const {
  return strategy_->sharded_gradients();
}

at::Tensor ZeroRedundancyOptimizerBase::clip_grad_norm_(double max_norm, const ClipGradNormOptions& options) {
  const auto gradients = sharded_gradients();
  if (!gradients)
    throw UsageError(shard_->rank(),
                     "ZeroRedundancyOptimizer::clip_grad_norm_: this rank has no shards of gradients; construct the "
                     "optimizer with Overlap::kGradients, or, with Overlap::kNone, call "
                     "clip_grad_norm_(ddp.parameters(), max_norm)");
  if (!(options.norm_type > 0))
    throw UsageError(shard_->rank(), text("ZeroRedundancyOptimizer::clip_grad_norm_: norm_type is ", options.norm_type,
                                          ", expected a positive number"));
  bool has_doubles = false;
  for (size_t i = 0; i < shard_->parameters().size(); ++i)
    has_doubles = has_doubles || shard_->parameters().tensor(i).scalar_type() == at::kDouble;
  return detail::clip_gradients(*gradients, max_norm, options,
                                [this, has_doubles](const at::Tensor& norm, double norm_type) {
                                  auto total = norm.to(shard_->group().device(), at::kDouble);
                                  if (std::isinf(norm_type)) {
                                    shard_->group().all_reduce(total, ReduceOp::kMax, detail::kInStep);
                                  } else {
                                    total = total.pow(norm_type);
                                    shard_->group().all_reduce(total, ReduceOp::kSum, detail::kInStep);
                                    total = total.pow(1 / norm_type);
                                  }
                                  return has_doubles ? total : total.to(at::kFloat);
                                });
}

detail::UpdateOfSharedParameters& detail::ZeroUndo::strategy_of(ZeroRedundancyOptimizerBase& optimizer) {
  if (auto* strategy = dynamic_cast<UpdateOfSharedParameters*>(optimizer.strategy_.get())) return *strategy;
  throw UsageError(optimizer.shard_->rank(),
                   "undo_step: steps can be undone with share_parameters and Overlap::kUpdate only");
}

void detail::ZeroUndo::keep_copies(ZeroRedundancyOptimizerBase& optimizer) {
  strategy_of(optimizer).keep_undo();
}

bool detail::ZeroUndo::undo_step(ZeroRedundancyOptimizerBase& optimizer) {
  return strategy_of(optimizer).undo_step();
}

// --- state

Value ZeroRedundancyOptimizerBase::consolidated_state_dict(int dst) const {
  return detail::consolidated_state(*shard_, dst);
}

Value ZeroRedundancyOptimizerBase::state_dict() const {
  return consolidated_state_dict();
}

void ZeroRedundancyOptimizerBase::load_state_dict(const Value& state) {
  detail::load_state(*shard_, state);
}

Value ZeroRedundancyOptimizerBase::shard_state_dict() const {
  return detail::state_of_shard(*shard_);
}

void ZeroRedundancyOptimizerBase::load_shards(size_t shards, const ReadShard& read) {
  detail::load_shards(*shard_, shards, read);
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

// --- Joinable

ProcessGroup ZeroRedundancyOptimizerBase::join_group() const {
  return shard_->group();
}

void ZeroRedundancyOptimizerBase::enter_join(std::shared_ptr<detail::JoinContext> context, bool is_first) {
  if (is_first)
    throw UsageError(shard_->rank(),
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
