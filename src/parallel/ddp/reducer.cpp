#include "parallel/ddp/reducer.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/capture.h"
#include "comm/group/group.h"

// Overview of one reduction.
//
// 1. plan_buckets() groups the parameters in reverse order of registration, which approximates the order of backward.
//    After the first reduction rebuild_buckets() plans again, in the order in which rank 0's gradients arrived.
// 2. on_gradient() runs after autograd has accumulated a parameter's gradient. The first call of a backward calls
//    begin() and registers a callback for the end of the backward. Each call copies the gradient into its bucket,
//    unless it was computed there (InPlaceGradients).
// 3. start_full_buckets() starts the all-reduce of full buckets strictly in the order of the plan, so that all ranks
//    issue the same sequence of collectives. The last bucket is reduced at the end of backward.
// 4. finish() runs at the end of the outermost backward. It adds the parameters that got no gradient, with their old
//    gradient or zeros, so that every bucket becomes full. The last bucket also carries the marks of used parameters
//    (UnusedParameterBitmap). Then finish() waits for all buckets and publishes the averages in .grad().
//
// A parameter on which no output depends (ReachableParameters) enters its bucket in begin(), if it may be unused.
// A frozen parameter enters its bucket as zeros in begin() and keeps its gradient. Sparse gradients are not in buckets:
// reduce_sparse_gradients() gathers their rows after the last bucket.
//
// With a static graph, the first backward counts the gradients of each parameter. Later ones use these counts to detect
// that a gradient is complete, and send marks only for check_finite. If backward throws, in_backward_ stays true and
// the next forward or backward throws UsageError: this rank has missed collectives and is out of step with the others.

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
      states_(parameters_.size()),
      used_(parameters_.size()),
      trained_in_forward_(parameters_.size()),
      marks_(parameters_.size()),
      reachable_(parameters_.size()),
      frozen_(parameters_.size()),
      hooks_(tensors_of(parameters_), group_.device(),
             [this](size_t parameter, const at::Tensor& arrived) { on_gradient(parameter, arrived); }) {
  std::vector<size_t> order;
  for (size_t i = parameters_.size(); i-- > 0;)
    if (!is_sparse(i)) order.push_back(i);
  plan_ = detail::plan_buckets(specs(), options_.limits, order);
  make_buckets();
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (may_be_computed_in_bucket(i)) InPlaceGradients::install();
}

void Reducer::begin_forward() {
  std::lock_guard lock(mutex_);
  if (!in_backward_) hooks_.connect();
  in_forward_ = true;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].tensor.requires_grad())
      trained_in_forward_[i] = 1;
    else if (options_.static_graph)
      throw UsageError(group_.rank(), text("parameter '", parameters_[i].name,
                                           "' is frozen, but with static_graph every backward must be like the first; "
                                           "wrap without static_graph"));
  }
}

void Reducer::end_forward(const std::vector<at::Tensor>& outputs) {
  std::lock_guard lock(mutex_);
  if (predicts_unused()) reachable_.note(outputs, hooks_.accumulators());
}

bool Reducer::will_reduce() const {
  std::lock_guard lock(mutex_);
  const auto is_trained = [](const NamedParameter& parameter) { return parameter.tensor.requires_grad(); };
  return enabled_ && std::any_of(parameters_.begin(), parameters_.end(), is_trained);
}

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

void Reducer::set_enabled(bool enabled) {
  std::lock_guard lock(mutex_);
  enabled_ = enabled;
}

bool Reducer::is_enabled() const {
  std::lock_guard lock(mutex_);
  return enabled_;
}

bool Reducer::has_unsynchronized() const {
  std::lock_guard lock(mutex_);
  return has_unsynchronized_;
}

void Reducer::set_static_graph() {
  std::lock_guard lock(mutex_);
  if (reductions_ > 0 && !options_.static_graph)
    throw UsageError(
        group_.rank(),
        "set_static_graph was called after the first backward, which records the graph; call it before the "
        "first backward, or wrap with {.static_graph = true}");
  options_.static_graph = true;
}

bool Reducer::is_static_graph() const {
  std::lock_guard lock(mutex_);
  return options_.static_graph;
}

void Reducer::check_finished() const {
  std::lock_guard lock(mutex_);
  if (in_backward_) throw_interrupted_backward();
}

int64_t Reducer::reductions() const {
  std::lock_guard lock(mutex_);
  return reductions_;
}

BucketPlan Reducer::plan() const {
  std::lock_guard lock(mutex_);
  return plan_;
}

// --- during backward

void Reducer::on_gradient(size_t parameter, const at::Tensor& arrived) {
  std::lock_guard lock(mutex_);
  const bool is_frozen_now = !parameters_[parameter].tensor.requires_grad();  // after forward: was not accumulated
  const bool is_defined = arrived.defined() && !is_frozen_now;
  if (is_defined) used_[parameter] = 1;
  if (!enabled_) {
    has_unsynchronized_ = has_unsynchronized_ || is_defined;
    return;
  }
  register_end_callback(current_backward_task());
  if (!is_defined) return;
  if (states_[parameter].is_in && reachable_.excludes(parameter)) throw_unexpected_gradient(parameter);
  frozen_[parameter] = 0;
  arrivals_.push_back(parameter);
  if (!is_complete(parameter)) return;
  put_in_bucket(parameter, arrived);
  // Frees the gradient's memory while it is still in the cache, so that autograd can reuse it for the next gradient.
  if (is_bucket_view(parameter))
    parameters_[parameter].tensor.mutable_grad() = view_of(parameter);
  else if (buckets_[states_[parameter].bucket].is_open())
    parameters_[parameter].tensor.mutable_grad().reset();
  start_full_buckets();
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
    if (are_all_frozen()) {
      in_forward_ = false;
      std::fill(trained_in_forward_.begin(), trained_in_forward_.end(), 0);
      return;
    }
    refuse_create_graph();
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
  const bool nothing_can_follow = tasks_.empty() && in_ == parameters_.size();
  if (task.depth == 0 || nothing_can_follow) finish();
}

void Reducer::begin() {
  if (hooks_.replaces_gradients()) weight_.wait_for_sum();  // throws before any collective of this backward
  in_backward_ = true;
  activity_->begin_backward();
  began_ = recorder_.now();
  started_ = 0;
  in_ = 0;
  arrivals_.clear();
  tasks_.clear();
  has_outermost_ = false;
  not_finite_.clear();
  for (auto& bucket : buckets_) bucket.reset();
  if (updater_) updater_->begin_backward(buckets_);
  for (auto& state : states_) {
    state.is_in = false;
    state.gradients = 0;
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    frozen_[i] = is_frozen(i);
    const bool cannot_arrive =
        !parameters_[i].tensor.requires_grad() || reachable_.excludes(i) || (knows_graph() && states_[i].expected == 0);
    if (cannot_arrive) put_without_new_gradient(i);
  }
  reserve_places();
}

// A gradient that was accumulated under no_sync() is reduced even if the parameter is frozen now. A parameter that was
// frozen in all forwards gets no gradient, although it may be trained again when backward runs.
bool Reducer::is_frozen(size_t parameter) const {
  if (used_[parameter]) return false;
  return !parameters_[parameter].tensor.requires_grad() || (in_forward_ && !trained_in_forward_[parameter]);
}

bool Reducer::are_all_frozen() const {
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (!is_frozen(i)) return false;
  return true;
}

/// Counts one more gradient of the parameter and returns whether its gradient is complete.
bool Reducer::is_complete(size_t parameter) {
  auto& state = states_[parameter];
  ++state.gradients;
  if (is_recording()) return false;
  if (knows_graph()) {
    if (state.gradients > state.expected)
      throw UsageError(group_.rank(), text("parameter '", parameters_[parameter].name, "' got ", state.gradients,
                                           " gradients in one backward, but ", state.expected,
                                           " in the first one; the graph is not static: wrap without static_graph"));
    return state.gradients == state.expected;
  }
  if (state.gradients > 1)
    throw UsageError(
        group_.rank(),
        text(
            "parameter '", parameters_[parameter].name,
            "' got a second gradient in one backward, after the first was already handed to the reduction; run all "
            "but the last of such backward passes under no_sync(), or wrap with {.static_graph = true} if checkpointed "
            "segments share the parameter"));
  return true;
}

// Does not copy a gradient that is in the bucket's memory already. `arrived` is what autograd has just accumulated.
void Reducer::put_in_bucket(size_t parameter, const at::Tensor& arrived) {
  c10::NoGradGuard no_grad;
  const auto& name = parameters_[parameter].name;
  auto gradient = frozen_[parameter] ? at::Tensor() : parameters_[parameter].tensor.grad();
  states_[parameter].is_in = true;
  ++in_;
  const bool looks = options_.check_finite && not_finite_.empty();
  if (is_sparse(parameter)) {  // reduced at the end of backward
    if (looks && gradient.defined() && !is_all_finite(gradient)) not_finite_ = name;
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
  release_place(parameter, gradient, arrived);
  auto& bucket = buckets_[states_[parameter].bucket];
  bucket.put(states_[parameter].slot, gradient);
  if (looks) {
    bucket.flush_pending_copies();
    if (!is_all_finite(view_of(parameter))) not_finite_ = name;
  }
}

// Adds a parameter that got no gradient in this backward, with its old gradient or zeros, so that the bucket becomes
// full and the other ranks do not wait for this rank. If the old gradient is in the bucket's memory, the reduction
// overwrites it: publish_gradient() restores it from a copy if no rank used the parameter.
void Reducer::put_without_new_gradient(size_t parameter) {
  const auto& gradient = parameters_[parameter].tensor.grad();
  if (is_bucket_view(parameter) && gradient.defined() && same_memory(gradient, view_of(parameter)))
    states_[parameter].kept = gradient.clone();
  put_in_bucket(parameter);
}

// Starts buckets in the order of the plan, which is the same on all ranks, regardless of the order in which gradients
// arrive. The last bucket is reduced at the end of backward, which is near, on the calling thread; this avoids waking
// up another thread.
void Reducer::start_full_buckets() {
  for (; started_ + 1 < buckets_.size() && buckets_[started_].is_full(); ++started_) start_bucket(started_);
}

// --- at the end of backward

void Reducer::finish() {
  const detail::EndOfBackward end(*activity_);
  c10::NoGradGuard no_grad;
  in_place_.withdraw();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto& state = states_[i];
    if (is_recording()) state.expected = state.gradients;
    if (state.is_in) continue;
    state.gradients > 0 ? put_in_bucket(i) : put_without_new_gradient(i);
  }
  if (needs_marks()) marks_.write(buckets_.back(), used_, frozen_, not_finite_.empty(), options_.static_graph);
  const auto computed = recorder_.now();
  reduce_the_rest();
  in_backward_ = false;
  read_usage_marks();
  reduce_sparse_gradients();
  for (size_t i = 0; i < parameters_.size(); ++i) publish_gradient(i);
  if (predicts_unused()) compare_with_prediction();
  has_recorded_ = true;
  ++reductions_;
  has_unsynchronized_ = false;
  in_forward_ = false;
  std::fill(trained_in_forward_.begin(), trained_in_forward_.end(), 0);

  const auto unused = needs_all_parameters() ? describe_unused(used_) : "";
  std::fill(used_.begin(), used_.end(), 0);
  check_frozen_alike();
  if (!unused.empty()) throw UsageError(group_.rank(), unused);
  record_step(computed);
  rebuild_buckets();
  if (marks_.is_not_finite_somewhere()) throw_not_finite();
}

void Reducer::compare_with_prediction() {
  std::vector<char> got_gradient;
  for (const auto& state : states_) got_gradient.push_back(state.gradients > 0);
  reachable_.compare(got_gradient);
}

void Reducer::reduce_the_rest() {
  start_full_buckets();
  if (hook_)
    start_bucket(buckets_.size() - 1);
  else
    buckets_.back().reduce();
  finish_all();
}

void Reducer::finish_all() {
  for (auto& bucket : buckets_)
    if (bucket.is_under_way()) bucket.finish();
}

void Reducer::record_step(const Moment& computed) {
  StepTimes step{.backward_begin = began_, .computed = computed, .backward_end = recorder_.now()};
  for (const auto& bucket : buckets_) step.buckets.push_back(bucket.times());
  recorder_.add(std::move(step));
}

// A rank that used every parameter does not need the other ranks' marks immediately, except in the first reduction:
// afterwards, ranks that disagree on static_graph would disagree on whether marks are sent. Replays of a captured step
// do not run this code, so the marks of the captured reduction are not read.
void Reducer::read_usage_marks() {
  if (!needs_marks()) return;
  bool has_unused = false;
  for (size_t i = 0; i < parameters_.size(); ++i) has_unused = has_unused || (!used_[i] && !frozen_[i]);
  const bool is_capturing = detail::is_capturing(group_.device());
  const bool is_first = reductions_ == 0 && !is_capturing;
  if (has_unused || options_.check_finite || is_first || !options_.defers_marks)
    marks_.learn(buckets_.back());
  else
    is_capturing ? marks_.assume_alike() : marks_.defer(buckets_.back());
  if (is_first && marks_.static_graph_differs())
    throw MismatchError(group_.rank(), text("set_static_graph was ", options_.static_graph ? "" : "not ",
                                            "called on this rank, but ", options_.static_graph ? "not " : "",
                                            "on another; call it on all ranks before the first backward"));
}

void Reducer::publish_gradient(size_t parameter) {
  auto& state = states_[parameter];
  auto& gradient = parameters_[parameter].tensor.mutable_grad();
  const auto kept = std::exchange(state.kept, at::Tensor());
  const bool is_used = marks_.used_somewhere(parameter) && !frozen_[parameter];
  if (is_sparse(parameter)) {
    if (is_used) gradient = kept;
    return;
  }
  const auto& view = view_of(parameter);
  if (is_used && updater_) {
    gradient.reset();  // it is this rank's own, and no longer needed
  } else if (!is_used) {
    if (kept.defined()) gradient.copy_(kept);
  } else if (!is_bucket_view(parameter)) {
    if (gradient.defined() && gradient.layout() == c10::kStrided)
      write(gradient, view);
    else
      gradient = view.to(parameters_[parameter].tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  } else if (!gradient.defined() || !same_memory(gradient, view)) {
    gradient = view;
  }
}

void Reducer::abandon_capture() {
  std::lock_guard lock(mutex_);
  if (updater_) updater_->abandon();
  in_backward_ = false;
  has_unsynchronized_ = false;
  for (auto& bucket : buckets_) bucket.reset();
  for (auto& state : states_) state.kept.reset();
  for (const auto& parameter : parameters_) parameter.tensor.mutable_grad().reset();
  std::fill(used_.begin(), used_.end(), 0);
  marks_ = UnusedParameterBitmap(parameters_.size());
}

void Reducer::shadow() {
  std::lock_guard lock(mutex_);
  c10::NoGradGuard no_grad;
  started_ = 0;
  arrivals_.clear();
  for (const auto& parameter : parameters_)
    parameter.tensor.mutable_grad().reset();  // left from this rank's last iteration
  for (size_t i = 0; i < parameters_.size(); ++i) release_place(i, {}, {});
  for (auto& bucket : buckets_) {
    bucket.clear();
    bucket.start(hook_, needs_marks());
  }
  finish_all();
  std::fill(frozen_.begin(), frozen_.end(), 0);
  read_usage_marks();
  reduce_sparse_gradients();
  for (size_t i = 0; i < parameters_.size(); ++i)
    publish_gradient(i);  // for ZeroRedundancyOptimizer, which steps on this rank as well
  ++reductions_;
  has_unsynchronized_ = false;
  not_finite_.clear();
  const bool needs_all = !options_.allow_unused && !options_.static_graph;
  const auto unused = needs_all ? describe_unused(std::vector<char>(used_.size(), 1)) : "";  // blames other ranks
  std::fill(used_.begin(), used_.end(), 0);
  if (!unused.empty()) throw UsageError(group_.rank(), unused);
  rebuild_buckets();
  if (marks_.is_not_finite_somewhere()) throw_not_finite();
}

}  // namespace lockstep
