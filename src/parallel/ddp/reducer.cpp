#include "parallel/ddp/reducer.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/capture.h"
#include "comm/strings.h"
#include "parallel/ddp/bucket.h"

// Overview of one reduction.
//
// 1. plan_buckets() groups the parameters in reverse order of registration, which approximates the order of backward.
//    After the first reduction rebuild_buckets() plans again, in the order in which rank 0's gradients arrived.
// 2. on_gradient() runs after autograd has accumulated a parameter's gradient. The first call of a backward calls
//    begin() and registers a callback for the end of the backward. Each call copies the gradient into its bucket.
// 3. start_full_buckets() starts the all-reduce of full buckets strictly in the order of the plan, so that all ranks
//    issue the same sequence of collectives. The last bucket is reduced at the end of backward.
// 4. finish() runs at the end of the outermost backward. It adds the parameters that got no gradient, with their old
//    gradient or zeros, so that every bucket becomes full. The last bucket also carries the marks of used parameters
//    (UnusedParameterBitmap). Then finish() waits for all buckets and publishes the averages in .grad().
//
// With a static graph, the first backward counts the gradients of each parameter. Later ones use these counts to detect
// that a gradient is complete, and send marks only for check_finite. If backward throws, in_backward_ stays true and
// the next forward or backward throws UsageError: this rank has missed collectives and is out of step with the others.

namespace lockstep {
namespace {

constexpr int kReference = 0;  // the rank whose arrival order determines the buckets

std::vector<detail::GradientSpec> specs_of(const std::vector<NamedParameter>& parameters) {
  std::vector<detail::GradientSpec> specs;
  for (const auto& [name, tensor] : parameters)
    specs.push_back({tensor.numel(), tensor.scalar_type(), tensor.device()});
  return specs;
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
      weight_(weight),
      recorder_(recorder),
      plan_(detail::plan_buckets(specs_of(parameters_), options.limits)),
      states_(parameters_.size()),
      used_(parameters_.size()),
      marks_(parameters_.size()),
      hooks_(tensors_of(parameters_), group_.device(),
             [this](size_t parameter, bool is_defined) { on_gradient(parameter, is_defined); }) {
  make_buckets();
}

void Reducer::connect() {
  std::lock_guard lock(mutex_);
  if (!in_backward_) hooks_.connect();
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
  const bool is_dense = gradient.defined() && gradient.layout() == c10::kStrided;
  return is_dense ? weight_.apply(gradient) : gradient;
}

// The last bucket has extra elements for the marks.
void Reducer::make_buckets() {
  buckets_.clear();
  ++plans_;
  for (size_t b = 0; b < plan_.buckets.size(); ++b) {
    std::vector<at::Tensor> members;
    for (size_t parameter : plan_.buckets[b]) {
      states_[parameter].bucket = b;
      states_[parameter].slot = members.size();
      members.push_back(parameters_[parameter].tensor);
    }
    buckets_.emplace_back(group_, b, members, b + 1 == plan_.buckets.size() ? marks_.elements() : 0, plans_, recorder_);
  }
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

void Reducer::set_hook(CommHook hook) {
  std::lock_guard lock(mutex_);
  if (hook_) throw UsageError(group_.rank(), "a comm hook is registered already; register only one for each wrapper");
  hook_ = std::move(hook);
}

void Reducer::check_finished() const {
  std::lock_guard lock(mutex_);
  if (in_backward_) throw_interrupted_backward();
}

void Reducer::throw_interrupted_backward() const {
  throw UsageError(
      group_.rank(),
      "the last backward did not finish, so this rank left the others in the middle of a reduction; end the "
      "job and resume from a checkpoint (if backward recomputes the whole model: call forward on the wrapper and "
      "return tensors from it)");
}

int64_t Reducer::reductions() const {
  std::lock_guard lock(mutex_);
  return reductions_;
}

BucketPlan Reducer::plan() const {
  std::lock_guard lock(mutex_);
  return plan_;
}

const at::Tensor& Reducer::view_of(size_t parameter) const {
  return buckets_[states_[parameter].bucket].gradient(states_[parameter].slot);
}

// --- during backward

void Reducer::on_gradient(size_t parameter, bool is_defined) {
  std::lock_guard lock(mutex_);
  if (is_defined) used_[parameter] = 1;
  if (!enabled_) {
    has_unsynchronized_ = has_unsynchronized_ || is_defined;
    return;
  }
  register_end_callback(current_backward_task());
  if (!is_defined) return;
  arrivals_.push_back(parameter);
  if (!is_complete(parameter)) return;
  put_in_bucket(parameter);
  // Frees the gradient's memory while it is still in the cache, so that autograd can reuse it for the next gradient.
  if (options_.gradient_as_bucket_view) parameters_[parameter].tensor.mutable_grad() = view_of(parameter);
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
    refuse_create_graph();
    begin();
  }
  if (std::find(tasks_.begin(), tasks_.end(), task.id) != tasks_.end()) return;
  if (task.depth == 0 && std::exchange(has_outermost_, true)) throw_interrupted_backward();
  tasks_.push_back(task.id);
  torch::autograd::Engine::get_default_engine().queue_callback([this, task] { on_task_end(task); });
}

// The reduction overwrites gradients in place, which autograd cannot differentiate.
void Reducer::refuse_create_graph() const {
  if (c10::GradMode::is_enabled())
    throw UsageError(
        group_.rank(),
        "backward was called with create_graph, but gradients lose their graph when they are averaged over "
        "the ranks; compute the inner gradients with torch::autograd::grad(..., create_graph), add the "
        "terms that use them to the loss, and call backward without create_graph");
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
  began_ = recorder_.now();
  started_ = 0;
  in_ = 0;
  arrivals_.clear();
  tasks_.clear();
  has_outermost_ = false;
  not_finite_.clear();
  for (auto& bucket : buckets_) bucket.reset();
  for (auto& state : states_) {
    state.is_in = false;
    state.gradients = 0;
  }
  if (!knows_graph()) return;
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (states_[i].expected == 0) put_without_new_gradient(i);
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

// Does not copy a gradient that autograd has accumulated in the bucket's memory.
void Reducer::put_in_bucket(size_t parameter) {
  c10::NoGradGuard no_grad;
  const auto& [name, tensor] = parameters_[parameter];
  const auto& gradient = tensor.grad();
  if (gradient.defined() && gradient.layout() != c10::kStrided)
    throw UsageError(group_.rank(),
                     text("the gradient of parameter '", name, "' has layout ", gradient.layout(),
                          ", expected Strided; only dense gradients can be averaged (for Embedding, set sparse to "
                          "false)"));
  auto& bucket = buckets_[states_[parameter].bucket];
  bucket.put(states_[parameter].slot, gradient);
  if (options_.check_finite && not_finite_.empty()) {
    bucket.flush_pending_copies();
    if (!at::isfinite(view_of(parameter)).all().item<bool>()) not_finite_ = name;
  }
  states_[parameter].is_in = true;
  ++in_;
}

// Adds a parameter that got no gradient in this backward, with its old gradient or zeros, so that the bucket becomes
// full and the other ranks do not wait for this rank. If the old gradient is in the bucket's memory, the reduction
// overwrites it: publish_gradient() restores it from a copy if no rank used the parameter.
void Reducer::put_without_new_gradient(size_t parameter) {
  const auto& gradient = parameters_[parameter].tensor.grad();
  if (gradient.defined() && same_memory(gradient, view_of(parameter))) states_[parameter].kept = gradient.clone();
  put_in_bucket(parameter);
}

// Starts buckets in the order of the plan, which is the same on all ranks, regardless of the order in which gradients
// arrive. The last bucket is reduced at the end of backward, which is near, on the calling thread; this avoids waking
// up another thread.
void Reducer::start_full_buckets() {
  for (; started_ + 1 < buckets_.size() && buckets_[started_].is_full(); ++started_) buckets_[started_].start(hook_);
}

// --- at the end of backward

void Reducer::finish() {
  c10::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto& state = states_[i];
    if (is_recording()) state.expected = state.gradients;
    if (state.is_in) continue;
    state.gradients > 0 ? put_in_bucket(i) : put_without_new_gradient(i);
  }
  if (needs_marks()) marks_.write(buckets_.back(), used_, not_finite_.empty(), options_.static_graph);
  const auto computed = recorder_.now();
  reduce_the_rest();
  in_backward_ = false;
  read_usage_marks();
  for (size_t i = 0; i < parameters_.size(); ++i) publish_gradient(i);
  has_recorded_ = true;
  ++reductions_;
  has_unsynchronized_ = false;

  const auto unused = options_.allow_unused || options_.static_graph ? "" : describe_unused();
  std::fill(used_.begin(), used_.end(), 0);
  if (!unused.empty()) throw UsageError(group_.rank(), unused);
  record_step(computed);
  rebuild_buckets();
  if (marks_.is_not_finite_somewhere()) throw_not_finite();
}

void Reducer::reduce_the_rest() {
  start_full_buckets();
  if (hook_)
    buckets_.back().start(hook_);
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
// afterwards, ranks that disagree on static_graph would disagree on whether marks are sent.
void Reducer::read_usage_marks() {
  if (!needs_marks()) return;
  const bool has_unused = std::find(used_.begin(), used_.end(), 0) != used_.end();
  const bool is_first = reductions_ == 0 && !detail::is_capturing(group_.device());
  marks_.learn(buckets_.back(), has_unused || options_.check_finite || is_first);
  if (is_first && marks_.static_graph_differs())
    throw MismatchError(group_.rank(), text("set_static_graph was ", options_.static_graph ? "" : "not ",
                                            "called on this rank, but ", options_.static_graph ? "not " : "",
                                            "on another; call it on all ranks before the first backward"));
}

void Reducer::publish_gradient(size_t parameter) {
  auto& state = states_[parameter];
  auto& gradient = parameters_[parameter].tensor.mutable_grad();
  const auto& view = view_of(parameter);
  const auto kept = std::exchange(state.kept, at::Tensor());
  if (!marks_.used_somewhere(parameter)) {
    if (kept.defined()) gradient.copy_(kept);
  } else if (!options_.gradient_as_bucket_view) {
    if (gradient.defined())
      write(gradient, view);
    else
      gradient = view.clone();
  } else if (!gradient.defined() || !same_memory(gradient, view)) {
    gradient = view;
  }
}

// Uses rank 0's arrival order, because the buckets must be the same on all ranks. Collective.
void Reducer::rebuild_buckets() {
  if (std::exchange(buckets_rebuilt_, true) || buckets_.size() < 2) return;
  std::vector<int64_t> order;
  std::vector<char> is_in(parameters_.size());
  auto add = [&](size_t parameter) {
    if (!std::exchange(is_in[parameter], true)) order.push_back(static_cast<int64_t>(parameter));
  };
  for (size_t i = 0; i < parameters_.size(); ++i)  // reversed below: parameters without a gradient end up last
    if (states_[i].gradients == 0) add(i);
  std::for_each(arrivals_.rbegin(), arrivals_.rend(), add);
  std::reverse(order.begin(), order.end());
  auto agreed = at::tensor(order).to(group_.device());
  group_.broadcast(agreed, kReference);
  agreed = agreed.cpu();
  const auto* index = agreed.data_ptr<int64_t>();

  auto plan = detail::plan_buckets(specs_of(parameters_), options_.limits, {index, index + agreed.numel()});
  if (plan == plan_) return;
  plan_ = std::move(plan);
  std::vector<at::Tensor> old;
  for (size_t i = 0; i < parameters_.size(); ++i) old.push_back(view_of(i));
  make_buckets();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto& gradient = parameters_[i].tensor.mutable_grad();
    if (!gradient.defined() || !same_memory(gradient, old[i])) continue;
    write(view_of(i), old[i]);
    gradient = view_of(i);
  }
}

void Reducer::abandon_capture() {
  std::lock_guard lock(mutex_);
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
  for (auto& bucket : buckets_) {
    bucket.clear();
    bucket.start(hook_);
  }
  finish_all();
  read_usage_marks();
  for (size_t i = 0; i < parameters_.size(); ++i)
    publish_gradient(i);  // for ZeroRedundancyOptimizer, which steps on this rank as well
  ++reductions_;
  has_unsynchronized_ = false;
  not_finite_.clear();
  std::fill(used_.begin(), used_.end(), 1);  // describe_unused() then blames other ranks, not this one
  const auto unused = options_.allow_unused || options_.static_graph ? "" : describe_unused();
  std::fill(used_.begin(), used_.end(), 0);
  if (!unused.empty()) throw UsageError(group_.rank(), unused);
  rebuild_buckets();
  if (marks_.is_not_finite_somewhere()) throw_not_finite();
}

/// Returns an error message, empty if every parameter was used on every rank.
std::string Reducer::describe_unused() const {
  std::vector<std::string> here;
  std::vector<std::string> elsewhere;
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (marks_.unused_somewhere(i)) (used_[i] ? elsewhere : here).push_back(text('\'', parameters_[i].name, '\''));
  if (here.empty() && elsewhere.empty()) return {};
  if (here.size() == parameters_.size())
    return text("rank ", group_.rank(),
                ": backward gave no gradient to any parameter of the wrapped model, so the loss does not depend on "
                "them; compute the loss from the wrapper's output, without detach() or NoGradGuard");
  auto sentence = [](const std::vector<std::string>& names, const char* where) {
    return names.empty() ? std::string() : text("no gradient ", where, " for ", enumerate(names), "; ");
  };
  return text("backward gave ", sentence(here, "on this rank"), sentence(elsewhere, "on another rank"),
              "use every parameter in the loss, or wrap with {.find_unused_parameters = true}");
}

// Collective: all ranks know that some gradient is not finite, but only the affected ranks know which.
void Reducer::throw_not_finite() const {
  const auto names = all_gather_strings(group_, not_finite_);
  std::vector<std::string> findings;
  for (size_t rank = 0; rank < names.size(); ++rank)
    if (!names[rank].empty()) findings.push_back(text("of parameter '", names[rank], "' on rank ", rank));
  throw Error(group_.rank(),
              text("backward number ", reductions_, " gave gradients that are NaN or infinite: ", enumerate(findings),
                   " (the first on each rank); lower the learning rate, clip gradients, or check the input"));
}

}  // namespace lockstep
