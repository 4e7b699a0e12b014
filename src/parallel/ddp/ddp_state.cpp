#include "parallel/ddp/ddp_state.h"

#include <numeric>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function_hook.h>

#include <lockstep/error.h>

#include "base/log.h"
#include "base/text.h"
#include "base/variables.h"
#include "comm/capture.h"
#include "comm/dense.h"
#include "comm/group/group.h"
#include "comm/setup/make_group.h"
#include "parallel/batch_norm/sync_batch_norm.h"
#include "parallel/ddp/model_check.h"

namespace lockstep::detail {
namespace {

constexpr int kSource = 0;  // the rank whose parameters and buffers all ranks receive

/// Notifies the reducer when backward reaches an output of the model.
class OutputHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit OutputHook(std::weak_ptr<Reducer> reducer) : reducer_(std::move(reducer)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    if (auto reducer = reducer_.lock()) reducer->on_output_gradient();
    return gradients;
  }

 private:
  const std::weak_ptr<Reducer> reducer_;
};

/// Whether autograd created the node before the operation number `begin` of this thread. A model that returns a tensor
/// of such a node passes a tensor of another network through: a backward of that network alone must not reduce this
/// model.
bool is_older(const torch::autograd::Node& node, uint64_t begin) {
  return node.thread_id() == at::RecordFunction::currentThreadId() && node.sequence_nr() < begin;
}

std::optional<c10::Device> only_device(const std::vector<c10::Device>& devices) {
  if (devices.size() > 1)
    throw UsageError(text("DistributedDataParallel: option device_ids has ", devices.size(),
                          " devices, expected at most 1; start one rank for each device"));
  return devices.empty() ? std::nullopt : std::optional(devices[0]);
}

bool uses_in_place_gradients(const DistributedDataParallelOptions& options) {
  return options.in_place_gradients &&
         read_number(process_variable, "LOCKSTEP_IN_PLACE_GRADIENTS", 0, 1).value_or(1) == 1;
}

}  // namespace

DdpState::DdpState(std::shared_ptr<torch::nn::Module> module, ProcessGroup group,
                   const DistributedDataParallelOptions& options)
    : group_(std::move(group)),
      options_(options),
      wrapped_(std::move(module), options.ignore),
      input_device_(only_device(options.device_ids)),
      buffers_(group_, tensors_of(wrapped_.buffers())),
      weight_(group_),
      recorder_(group_.device()),
      activity_(group_of(group_)->activity()),
      watch_(tensors_of(wrapped_.parameters())) {
  check_trainable(wrapped_, options, input_device_, group_);
  if (options.init_sync) {
    check_same_model(wrapped_, options, group_);
    broadcast_parameters_and_buffers(kSource);
  }
  separate_batch_norm();
  reducer_ =
      std::make_shared<Reducer>(wrapped_.trained(), group_,
                                ReducerOptions{.buckets = {.limits = options.buckets,
                                                           .gradient_as_bucket_view = options.gradient_as_bucket_view,
                                                           .in_place_gradients = uses_in_place_gradients(options),
                                                           .reduce_dtype = options.reduce_dtype},
                                               .allow_unused = options.find_unused_parameters,
                                               .static_graph = options.static_graph,
                                               .check_finite = options.check_finite,
                                               .sparse_parameters = wrapped_.sparse_parameters(options),
                                               .densify_sparse_gradients = options.densify_sparse_gradients,
                                               .defers_marks = group_.device().is_cuda()},
                                weight_, recorder_);
}

// Gives SyncBatchNorm layers over this wrapper's group a side group for their calls in backward, which would otherwise
// wait for the gradient buckets in the group's queue. Collective if the model has such layers.
//
// Not on a GPU. There the calls of a group are kernels on streams. Kernels of two NCCL communicators can deadlock if
// the ranks launch them in different orders and one of them occupies the device, and the order of buckets and layers
// depends on the order in which gradients arrive on each rank. One communicator keeps them in order.
void DdpState::separate_batch_norm() {
  if (group_.size() == 1 || !group_.device().is_cpu()) return;
  if (synced_batch_norms_over(wrapped_.module(), group_) == 0) return;
  make_side_group(*group_of(group_), {"constructor of DistributedDataParallel, for SyncBatchNorm", 0});
}

// Evaluation does not communicate, so ranks may evaluate different numbers of batches.
void DdpState::before_forward() {
  recorder_.begin_forward();
  if (activity_->is_training_thread()) activity_->enter(Activity::Phase::kForward);
  forward_begin_ = at::sequence_number::peek();
  watch_.end();
  reducer_->check_finished();
  if (!reducer_->has_unsynchronized()) watch_.forget();  // a step after a reduction
  check_unchanged();
  if (!c10::GradMode::is_enabled()) return;
  reducer_->begin_forward();
  if (Recording::is_active()) take_part_in_capture();
  const bool is_training = wrapped_.module().is_training();
  int source = kSource;
  if (join_) {
    if (leads_join_)
      join_->next_round({weight_.samples_in_join(), weight_.is_set(), reducer_->will_reduce(), is_training});
    weigh(join_->round());
    source = join_->round().last_rank();
  }
  if (!is_training) return;
  warn_of_lone_step();
  // Not under no_sync(), where ranks may have different numbers of forwards.
  const bool may_check = options_.check_replicas_every > 0 && !join_ && reducer_->is_enabled();
  if (may_check && iterations_++ % options_.check_replicas_every == 0) check_replicas();
  broadcast_buffers_if_due(source);
}

// Broadcasts the buffers once per reduction. If several forwards precede a reduction (gradient accumulation, or one
// backward through all of them), only the first forward broadcasts: a buffer that changed between the forwards would
// make that backward fail.
void DdpState::broadcast_buffers_if_due(int source) {
  const auto now = reducer_->reductions();
  if (options_.broadcast_buffers && std::exchange(buffers_broadcast_at_, now) != now) broadcast_buffers(source);
}

// A captured graph contains the addresses of the parameters, the backward of the trained parameters and, if
// set_batch_weight was called before, the weighting of the gradients. None of these may change between capture and
// replay.
void DdpState::take_part_in_capture() {
  struct Captured {
    const void* address;
    bool is_trained;
  };
  std::vector<Captured> captured;
  for (const auto& [name, tensor] : reducer_->parameters())
    captured.push_back({tensor.data_ptr(), tensor.requires_grad()});
  Recording::before_replay([reducer = reducer_, captured, weighs = reducer_->weighs_gradients()] {
    for (size_t i = 0; i < captured.size(); ++i) {
      const auto& [name, tensor] = reducer->parameters()[i];
      if (tensor.data_ptr() != captured[i].address)
        throw UsageError(text("parameter '", name,
                              "' was moved to other memory after the step was captured (torch::load, set_data or "
                              "to()); create a new CapturedStep after loading"));
      if (tensor.requires_grad() != captured[i].is_trained)
        throw UsageError(text("parameter '", name, "' was ", captured[i].is_trained ? "trained" : "frozen",
                              " when the step was captured and is ", captured[i].is_trained ? "frozen" : "trained",
                              " now; create a CapturedStep for each set of frozen parameters"));
    }
    if (reducer->weighs_gradients() != weighs)
      throw UsageError(
          "set_batch_weight was first called after the step was captured, so the captured step does not weight its "
          "gradients; call set_batch_weight before the first call of the step");
  });
  Recording::if_abandoned([this] {
    reducer_->abandon_capture();
    buffers_broadcast_at_ = -1;
  });
}

void DdpState::after_forward(const std::vector<at::Tensor>& outputs) {
  recorder_.end_forward();
  if (activity_->is_training_thread()) activity_->enter(Activity::Phase::kOther);
  reducer_->check_deferred();  // now, because the device computes this forward while the host waits
  if (!c10::GradMode::is_enabled()) {
    if (!has_warned_ && reducer_->has_unsynchronized()) watch_.begin();
    return;
  }
  if (!reducer_->is_enabled()) watch_parameters_under_no_sync();
  reducer_->end_forward(outputs);
  for (const auto& output : outputs)
    if (const auto& node = output.grad_fn(); node && !is_older(*node, forward_begin_))
      node->add_pre_hook(std::make_unique<OutputHook>(reducer_));
}

void DdpState::check_unchanged() const {
  const auto change = wrapped_.describe_change();
  if (!change.empty())
    throw UsageError(group_.rank(),
                     text(change,
                          "; the wrapper synchronizes the parameters and buffers that the model had when it was "
                          "wrapped: change the model first, then wrap it again"));
}

void DdpState::begin_no_sync() {
  warn_of_lone_step();
  if (!reducer_->has_unsynchronized()) watch_.forget();
  reducer_->set_enabled(false);
  watch_parameters_under_no_sync();
}

void DdpState::end_no_sync(bool was_enabled) {
  reducer_->set_enabled(was_enabled);
  if (!has_warned_ && reducer_->has_unsynchronized()) watch_.begin();
}

// A step under no_sync() is detected only if the backward before it is watched as well, which slows down its operators.
// A program that makes such steps makes them before its first reduction, so later backwards are not watched.
void DdpState::watch_parameters_under_no_sync() {
  const auto now = reducer_->reductions();
  if (watched_since_ < 0) watched_since_ = now;
  if (!has_warned_ && now == watched_since_) watch_.begin();
}

// Warns if an optimizer made a step between a backward under no_sync() and the next reduction.
void DdpState::warn_of_lone_step() {
  if (has_warned_ || !watch_.has_found_step() || !reducer_->has_unsynchronized()) return;
  has_warned_ = true;
  log_warning(
      text("rank ", group_.rank(),
           ": parameters changed after a backward under no_sync() that no synchronized backward followed, so this rank "
           "stepped with its local gradients and the replicas have diverged; run the last backward before each step "
           "outside of no_sync()"));
}

void DdpState::set_batch_weight(double samples) {
  const auto layer = weight_.is_set() ? std::nullopt : synced_batch_norm_in(wrapped_.module());
  if (layer)  // its backward sums gradients over the ranks before they could be weighted
    throw UsageError(group_.rank(),
                     text("set_batch_weight: layer '", *layer,
                          "' is a SyncBatchNorm, which sums over the ranks during backward; instead, divide each "
                          "rank's summed loss by the mean number of samples per rank, or call accumulate()"));
  join_ ? weight_.set_in_join(samples) : weight_.set(samples);
  reducer_->weigh_gradients();
}

void DdpState::broadcast_buffers(int source) {
  buffers_.run(source);
}

void DdpState::broadcast_parameters_and_buffers(int source) {
  const auto parameters = tensors_of(wrapped_.parameters());
  group_.broadcast_coalesced(parameters, source);
  // On the source rank as well: an optimizer of parameters that all ranks share expects equal writes on all ranks.
  bump_versions(parameters);
  broadcast_buffers(source);
  watch_.forget();
}

void DdpState::check_replicas() const {
  check_equal(wrapped_.parameters(), group_);
}

// --- join

void DdpState::enter_join(std::shared_ptr<JoinContext> context, bool is_first) {
  const auto layer = synced_batch_norm_in(wrapped_.module());
  if (layer && !context->options().throw_on_early_termination)
    throw UsageError(group_.rank(),
                     text("join: layer '", *layer,
                          "' is a SyncBatchNorm, and a rank without inputs cannot take part in its collectives; set "
                          "throw_on_early_termination, or give all ranks the same number of inputs"));
  if (reducer_->updates_in_backward())
    throw UsageError(
        group_.rank(),
        "join: a ZeroRedundancyOptimizer with the option overlap is not supported in a join, because a rank "
        "without inputs does not know the learning rates of the others; leave overlap out");
  join_ = std::move(context);
  leads_join_ = is_first;
  reducer_->weigh_gradients();
}

void DdpState::leave_join() noexcept {
  join_.reset();
  weight_.leave_join();
}

void DdpState::weigh(const JoinRound& round) {
  const bool by_all = join_->options().divide_by_initial_world_size && !round.is_weighted;
  const double sum = std::accumulate(round.weights.begin(), round.weights.end(), 0.0);
  weight_.begin_round(round.weights[group_.rank()], by_all ? group_.size() : sum);
}

void DdpState::shadow(const JoinRound& round) {
  if (round.is_training) broadcast_buffers_if_due(round.last_rank());
  if (round.is_synchronized) reducer_->shadow();
}

}  // namespace lockstep::detail
