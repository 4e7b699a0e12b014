#include "parallel/ddp/reducer.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/capture.h"
#include "comm/group/group.h"
#include "comm/run_and_agree.h"
#include "parallel/ddp/reducer_errors.h"
#include "parallel/ddp/sparse_gradients.h"

// Overview of one reduction.
//
// 1. The buckets are planned in reverse order of registration, which approximates the order of backward, and after the
//    first reduction again, in the order in which rank 0's gradients arrived (GradientBuckets).
// 2. on_gradient() runs after autograd has accumulated a parameter's gradient. The first call of a backward calls
//    begin() and registers a callback for the end of the backward. A gradient that is complete (GradientArrivals) is
//    handed over: copied into its bucket, unless it was computed there (InPlaceGradients).
// 3. The all-reduce of full buckets starts strictly in the order of the plan, so that all ranks issue the same sequence
//    of collectives. The last bucket is reduced at the end of backward.
// 4. finish() runs at the end of the outermost backward. It hands over the parameters that got no gradient, with their
//    old gradient or zeros, so that every bucket becomes full. The last bucket also carries the marks of used
//    parameters (ParameterUsage). Then finish() waits for all buckets and publishes the averages in .grad().
//
// A parameter on which no output depends (ReachableParameters) is handed over in begin(), if it may be unused. A frozen
// parameter enters its bucket as zeros in begin() and keeps its gradient. Sparse gradients are not in buckets:
// reduce_sparse_gradients() gathers their rows after the last bucket.
//
// If backward throws, in_backward_ stays true and the next forward or backward throws UsageError: this rank has missed
// collectives that the other ranks have made.

namespace lockstep {
namespace {

std::vector<char> which_are_named(const std::vector<NamedParameter>& parameters,
                                  const std::vector<std::string>& names) {
  std::vector<char> result;
  for (const auto& [name, tensor] : parameters)
    result.push_back(std::find(names.begin(), names.end(), name) != names.end());
  return result;
}

bool is_all_finite(const at::Tensor& tensor) {
  return at::isfinite(tensor.is_sparse() ? tensor._values() : tensor).all().item<bool>();
}

}  // namespace

std::vector<at::Tensor> tensors_of(const std::vector<NamedParameter>& parameters) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : parameters) tensors.push_back(tensor);
  return tensors;
}

Reducer::Reducer(std::vector<NamedParameter> parameters, ProcessGroup group, const ReducerOptions& options,
                 BatchWeight& weight, StepRecorder& recorder)
    : parameters_(std::move(parameters)),
      group_(std::move(group)),
      options_(options),
      sparse_(which_are_named(parameters_, options.sparse_parameters)),
      weight_(weight),
      recorder_(recorder),
      activity_(detail::group_of(group_)->activity()),
      usage_(parameters_, group_, options.defers_marks),
      arrivals_(parameters_, group_.rank(), options.static_graph),
      buckets_(parameters_, sparse_, group_, options.buckets, usage_, recorder_),
      is_handed_over_(parameters_.size()),
      kept_(parameters_.size()),
      hooks_(tensors_of(parameters_), group_.device(),
             [this](size_t parameter, const at::Tensor& arrived) { on_gradient(parameter, arrived); }) {}

// --- settings

void Reducer::set_enabled(bool enabled) {
  std::lock_guard lock(mutex_);
  enabled_ = enabled;
}

bool Reducer::is_enabled() const {
  std::lock_guard lock(mutex_);
  return enabled_;
}

bool Reducer::will_reduce() const {
  std::lock_guard lock(mutex_);
  const auto is_trained = [](const NamedParameter& parameter) { return parameter.tensor.requires_grad(); };
  return enabled_ && std::any_of(parameters_.begin(), parameters_.end(), is_trained);
}

bool Reducer::has_unsynchronized() const {
  std::lock_guard lock(mutex_);
  return has_unsynchronized_;
}

void Reducer::set_static_graph() {
  std::lock_guard lock(mutex_);
  if (reductions_ > 0 && !arrivals_.is_static_graph())
    throw UsageError(
        group_.rank(),
        "set_static_graph was called after the first backward, which records the graph; call it before the "
        "first backward, or wrap with {.static_graph = true}");
  arrivals_.set_static_graph();
}

bool Reducer::is_static_graph() const {
  std::lock_guard lock(mutex_);
  return arrivals_.is_static_graph();
}

void Reducer::set_hook(CommHook hook) {
  std::lock_guard lock(mutex_);
  if (buckets_.has_hook())
    throw UsageError(group_.rank(), "a comm hook is registered already; register only one for each wrapper");
  buckets_.set_hook(std::move(hook));
}

void Reducer::set_update(std::shared_ptr<detail::BucketUpdate> update) {
  detail::run_and_agree(group_, [&] { check_can_update(); });
  std::lock_guard lock(mutex_);
  buckets_.set_update(std::move(update));
}

void Reducer::check_can_update() const {
  std::lock_guard lock(mutex_);
  const auto refuse = [&](const std::string& what, const char* why, const std::string& remedy) {
    throw UsageError(group_.rank(), text("ZeroRedundancyOptimizer: the option overlap cannot be combined with ", what,
                                         " of DistributedDataParallel, because ", why, "; ", remedy,
                                         ", or construct the optimizer without overlap"));
  };
  const auto refuse_option = [&](const std::string& option, const char* why) {
    refuse("the option " + option, why, "wrap the model without " + option);
  };
  if (buckets_.has_update())
    throw UsageError(group_.rank(),
                     "ZeroRedundancyOptimizer: another optimizer with the option overlap was constructed with this "
                     "DistributedDataParallel; wrap the model again");
  if (buckets_.has_hook()) refuse("a comm hook", "the optimizer reduces the buckets itself", "register no hook");
  if (options_.allow_unused)
    refuse_option("find_unused_parameters", "a parameter must not be updated in a step that does not use it");
  if (options_.check_finite)
    refuse_option("check_finite", "a bad gradient is found only after other parameters are updated");
  if (options_.buckets.reduce_dtype)
    refuse_option("reduce_dtype", "gradients are averaged in the dtype of the parameters");
  if (!options_.sparse_parameters.empty())
    refuse("sparse gradients", "they are not in buckets", "set densify_sparse_gradients");
}

bool Reducer::updates_in_backward() const {
  std::lock_guard lock(mutex_);
  return buckets_.has_update();
}

int64_t Reducer::reductions() const {
  std::lock_guard lock(mutex_);
  return reductions_;
}

BucketPlan Reducer::plan() const {
  std::lock_guard lock(mutex_);
  return buckets_.plan();
}

// With a static graph, marks are sent in the first reduction and for check_finite only. The first reduction is
// the first of the group, although a rank that has no input in the first iteration of a join records its graph later:
// ranks must agree on whether marks are sent.
bool Reducer::needs_marks() const {
  return !arrivals_.is_static_graph() || reductions_ == 0 || options_.check_finite;
}

/// Whether a parameter without a gradient is an error, after the reduction was counted.
bool Reducer::needs_all_parameters() const {
  return !options_.allow_unused && (!arrivals_.is_static_graph() || (buckets_.has_update() && reductions_ == 1));
}

// --- forward

void Reducer::begin_forward() {
  std::lock_guard lock(mutex_);
  if (!in_backward_) hooks_.connect();
  usage_.begin_forward();
  if (!arrivals_.is_static_graph()) return;
  for (const auto& [name, tensor] : parameters_)
    if (!tensor.requires_grad())
      throw UsageError(group_.rank(), text("parameter '", name,
                                           "' is frozen, but with static_graph every backward must be like the first; "
                                           "wrap without static_graph"));
}

void Reducer::end_forward(const std::vector<at::Tensor>& outputs) {
  std::lock_guard lock(mutex_);
  if (predicts_unused()) usage_.end_forward(outputs, hooks_.accumulators());
}

void Reducer::check_finished() const {
  std::lock_guard lock(mutex_);
  if (!in_backward_) return;
  if (std::find(tasks_.begin(), tasks_.end(), current_backward_task().id) != tasks_.end())
    throw forward_in_backward(group_.rank());
  throw_interrupted_backward();
}

void Reducer::check_deferred() {
  std::lock_guard lock(mutex_);
  if (!in_backward_) usage_.check_deferred(needs_all_parameters());
}

// --- weights

void Reducer::weigh_gradients() {
  std::lock_guard lock(mutex_);
  if (!hooks_.replaces_gradients())
    hooks_.replace_gradients([this](const at::Tensor& gradient) { return weigh(gradient); });
}

bool Reducer::weighs_gradients() const {
  std::lock_guard lock(mutex_);
  return hooks_.replaces_gradients();
}

// Runs before autograd accumulates the gradient, so each backward of a gradient accumulation has its own weight.
at::Tensor Reducer::weigh(const at::Tensor& gradient) {
  std::lock_guard lock(mutex_);
  if (!gradient.defined()) return gradient;
  if (!gradient.is_sparse()) return weight_.apply(gradient);
  if (options_.densify_sparse_gradients) return weight_.apply(gradient.to_dense());
  const auto rows = gradient.coalesce();
  return at::sparse_coo_tensor(rows.indices(), weight_.apply(rows.values()), rows.sizes());
}

// --- during backward

void Reducer::on_gradient(size_t parameter, const at::Tensor& arrived) {
  std::lock_guard lock(mutex_);
  const bool is_frozen_now = !parameters_[parameter].tensor.requires_grad();  // after forward: was not accumulated
  const bool is_defined = arrived.defined() && !is_frozen_now;
  if (is_defined) usage_.note_use(parameter);
  if (!enabled_) {
    has_unsynchronized_ = has_unsynchronized_ || is_defined;
    return;
  }
  register_end_callback(current_backward_task());
  if (!is_defined) return;
  if (is_handed_over_[parameter] && usage_.is_unreachable(parameter))
    throw unexpected_gradient(group_.rank(), parameters_[parameter].name);
  if (!arrivals_.add(parameter)) return;
  hand_over(parameter, arrived);
  buckets_.release(parameter);
  buckets_.start_full();
}

void Reducer::on_output_gradient() {
  std::lock_guard lock(mutex_);
  const auto task = current_backward_task();
  if (enabled_ && !task.is_partial) register_end_callback(task);
}

// Checkpointed segments of a model run backward inside of backward. A callback is bound to the task in which it is
// queued, so each task needs its own.
void Reducer::register_end_callback(const BackwardTask& task) {
  if (!in_backward_) {
    if (usage_.are_all_frozen()) return usage_.forget_forwards();
    refuse_create_graph(group_.rank());
    begin();
  }
  if (std::find(tasks_.begin(), tasks_.end(), task.id) != tasks_.end()) return;
  if (task.depth == 0 && std::exchange(has_outermost_, true)) throw_interrupted_backward();
  tasks_.push_back(task.id);
  torch::autograd::Engine::get_default_engine().queue_callback([this, task] { on_task_end(task); });
}

void Reducer::on_task_end(const BackwardTask& task) {
  std::lock_guard lock(mutex_);
  std::erase(tasks_, task.id);
  if (!in_backward_) return;
  const auto all_are_in = [&] { return std::count(is_handed_over_.begin(), is_handed_over_.end(), 0) == 0; };
  if (task.depth == 0 || (tasks_.empty() && all_are_in())) finish();
}

void Reducer::begin() {
  if (hooks_.replaces_gradients()) weight_.wait_for_sum();  // throws before any collective of this backward
  in_backward_ = true;
  activity_->begin_backward();
  began_ = recorder_.now();
  tasks_.clear();
  has_outermost_ = false;
  not_finite_.clear();
  std::fill(is_handed_over_.begin(), is_handed_over_.end(), 0);
  arrivals_.begin();
  usage_.begin_backward();
  buckets_.begin_backward(needs_marks());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const bool cannot_arrive =
        !parameters_[i].tensor.requires_grad() || usage_.is_unreachable(i) || arrivals_.excludes(i);
    if (cannot_arrive) hand_over_without_new_gradient(i);
  }
  buckets_.reserve_in_place(is_handed_over_);
}

// `arrived` is the gradient that autograd has just accumulated.
void Reducer::hand_over(size_t parameter, const at::Tensor& arrived) {
  c10::NoGradGuard no_grad;
  const auto& [name, tensor] = parameters_[parameter];
  auto gradient = usage_.is_frozen(parameter) ? at::Tensor() : tensor.grad();
  is_handed_over_[parameter] = 1;
  const bool is_checked = options_.check_finite && not_finite_.empty();
  if (is_sparse(parameter)) {  // reduced at the end of backward
    if (is_checked && gradient.defined() && !is_all_finite(gradient)) not_finite_ = name;
    return;
  }
  if (gradient.defined() && gradient.layout() != c10::kStrided) {
    if (!options_.densify_sparse_gradients)
      throw UsageError(group_.rank(),
                       text("the gradient of parameter '", name, "' has layout ", gradient.layout(),
                            ", expected Strided; name the parameter in the option sparse_parameters, or set "
                            "densify_sparse_gradients"));
    gradient = gradient.to_dense();
  }
  buckets_.put(parameter, gradient, arrived);
  if (is_checked && !is_all_finite(buckets_.read(parameter))) not_finite_ = name;
}

// With the old gradient or zeros, so that the bucket becomes full and the other ranks do not wait for this rank. If the
// old gradient is in the bucket's memory, the reduction overwrites it: publish_gradients() restores it from a copy if
// no rank used the parameter.
void Reducer::hand_over_without_new_gradient(size_t parameter) {
  const auto& gradient = parameters_[parameter].tensor.grad();
  if (buckets_.is_view(parameter) && gradient.defined() && same_memory(gradient, buckets_.view(parameter)))
    kept_[parameter] = gradient.clone();
  hand_over(parameter);
}

// --- at the end of backward

void Reducer::finish() {
  const detail::EndOfBackward end(*activity_);
  c10::NoGradGuard no_grad;
  buckets_.withdraw_in_place();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (is_handed_over_[i]) continue;
    arrivals_.has(i) ? hand_over(i) : hand_over_without_new_gradient(i);
  }
  if (needs_marks()) usage_.write_marks(buckets_.last(), not_finite_.empty(), arrivals_.is_static_graph());
  const auto computed = recorder_.now();
  buckets_.finish_backward();
  in_backward_ = false;
  read_marks();
  reduce_sparse_gradients();
  publish_gradients();
  if (predicts_unused()) {
    std::vector<char> got_gradient;
    for (size_t i = 0; i < parameters_.size(); ++i) got_gradient.push_back(arrivals_.has(i));
    usage_.compare_with_prediction(got_gradient);
  }
  arrivals_.end();
  ++reductions_;
  has_unsynchronized_ = false;
  usage_.end_reduction(needs_all_parameters());
  record_step(computed);
  end_reduction();
}

// In the first reduction the marks are read at once: in later reductions, ranks that disagree on static_graph would
// disagree on whether marks are sent.
void Reducer::read_marks() {
  if (!needs_marks()) return;
  const bool is_first = reductions_ == 0 && !detail::is_capturing(group_.device());
  usage_.read_marks(buckets_.last(), /*at_once=*/is_first || options_.check_finite);
  const bool is_static = arrivals_.is_static_graph();
  if (is_first && usage_.static_graph_differs())
    throw MismatchError(group_.rank(),
                        text("set_static_graph was ", is_static ? "" : "not ", "called on this rank, but ",
                             is_static ? "not " : "", "on another; call it on all ranks before the first backward"));
}

// All ranks gather the rows of all sparse gradients, in the order of the parameters.
void Reducer::reduce_sparse_gradients() {
  std::vector<size_t> sparse;
  std::vector<at::Tensor> gradients, tensors;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!is_sparse(i)) continue;
    sparse.push_back(i);
    tensors.push_back(parameters_[i].tensor);
    gradients.push_back(parameters_[i].tensor.grad());
  }
  if (sparse.empty()) return;
  if (detail::is_capturing(group_.device()))
    throw UsageError(group_.rank(),
                     "a step with sparse gradients cannot be captured, because the number of rows differs from step to "
                     "step; set densify_sparse_gradients");
  const auto averages = average_sparse(group_, gradients, tensors);
  for (size_t i = 0; i < sparse.size(); ++i)
    if (usage_.is_used_somewhere(sparse[i]) && !usage_.is_frozen(sparse[i])) tensors[i].mutable_grad() = averages[i];
}

void Reducer::publish_gradients() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (is_sparse(i)) continue;
    const auto kept = std::exchange(kept_[i], at::Tensor());
    if (usage_.is_used_somewhere(i) && !usage_.is_frozen(i))
      buckets_.publish(i);
    else if (kept.defined())
      parameters_[i].tensor.mutable_grad().copy_(kept);
  }
}

void Reducer::record_step(const Moment& computed) {
  recorder_.add(
      {.backward_begin = began_, .computed = computed, .backward_end = recorder_.now(), .buckets = buckets_.times()});
}

/// Collective.
void Reducer::end_reduction() {
  buckets_.rebuild(arrivals_.order());
  if (usage_.is_not_finite_somewhere()) throw_not_finite(group_, not_finite_, reductions_);
}

// The gradients that are left from this rank's last iteration are dropped. The averages are for
// ZeroRedundancyOptimizer, which steps on this rank as well.
void Reducer::shadow() {
  std::lock_guard lock(mutex_);
  c10::NoGradGuard no_grad;
  arrivals_.begin();
  for (const auto& parameter : parameters_) parameter.tensor.mutable_grad().reset();
  buckets_.reduce_zeros(needs_marks());
  usage_.begin_shadow();
  read_marks();
  reduce_sparse_gradients();
  publish_gradients();
  ++reductions_;
  has_unsynchronized_ = false;
  not_finite_.clear();
  usage_.end_shadow(needs_all_parameters());
  end_reduction();
}

// --- failures

void Reducer::throw_interrupted_backward() const {
  buckets_.withdraw_in_place();
  throw interrupted_backward(group_.rank());
}

void Reducer::abandon_capture() {
  std::lock_guard lock(mutex_);
  in_backward_ = false;
  has_unsynchronized_ = false;
  buckets_.abandon();
  usage_.abandon();
  for (auto& kept : kept_) kept.reset();
  for (const auto& parameter : parameters_) parameter.tensor.mutable_grad().reset();
}

}  // namespace lockstep
