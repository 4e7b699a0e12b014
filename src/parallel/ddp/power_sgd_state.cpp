// The part of PowerSgd that saves and loads its state.

#include <iterator>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "parallel/ddp/averaging_hook.h"
#include "parallel/ddp/power_sgd.h"

namespace lockstep {
namespace detail {
namespace {

constexpr const char* kReductions = "iteration";
constexpr const char* kRank = "rank";
constexpr const char* kErrors = "errors";
constexpr const char* kFactors = "factors";

constexpr const char* kOtherModel = "load the state of the same model and options, or none";

Value copy_of(const at::Tensor& tensor) {
  return tensor.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
}

}  // namespace

PowerSgd::PowerSgd(const PowerSgdOptions& options) : options_(options) {
  if (options.rank < 1) throw UsageError(text("power_sgd: option rank is ", options.rank, ", expected 1 or more"));
  if (options.start_iteration < 0)
    throw UsageError(text("power_sgd: option start_iteration is ", options.start_iteration, ", expected 0 or more"));
}

Value PowerSgd::save() const {
  auto errors = Value::dict(), factors = Value::dict();
  for (const auto& [name, memory] : memories_) {
    if (memory.error.defined()) errors.items().emplace_back(name, copy_of(memory.error));
    if (memory.factor.defined()) factors.items().emplace_back(name, copy_of(memory.factor));
  }
  return Value::dict({{kReductions, reductions()},
                      {kRank, options_.rank},
                      {kErrors, std::move(errors)},
                      {kFactors, std::move(factors)}});
}

void PowerSgd::load(const Value& value) {
  const auto rank = value.at(kRank).as_int(), reductions = value.at(kReductions).as_int();
  if (rank != options_.rank)
    throw UsageError(text("power_sgd: the loaded state has rank ", rank, ", but option rank is ", options_.rank,
                          "; set the option to ", rank, ", or do not load the state"));
  if (reductions < 0) throw UsageError(text("power_sgd: the loaded state has ", reductions, " iterations"));
  std::map<std::string, Memory> memories;
  if (options_.use_error_feedback)
    for (const auto& [name, error] : value.at(kErrors).items())
      memories[name.as_string()].error = error.tensor().clone();
  if (options_.warm_start)
    for (const auto& [name, factor] : value.at(kFactors).items())
      memories[name.as_string()].factor = factor.tensor().clone();
  memories_ = std::move(memories);
  buckets_.clear();
  in_first_round_ = nullptr;
  undecided_.clear();
  reductions_ = reductions;
  loaded_.clear();
  for (const auto& [name, memory] : memories_) loaded_.insert(name);
  checks_names_ = !loaded_.empty();
}

// The average of the gradients contains the average of the errors, however many ranks there are.
void PowerSgd::load(const std::vector<Value>& states, const ProcessGroup& group) {
  if (states.empty()) throw UsageError(group.rank(), "power_sgd: the loaded list of states is empty");
  if (static_cast<int>(states.size()) == group.size()) return load(states[static_cast<size_t>(group.rank())]);
  load(states[0]);
  for (auto& [name, memory] : memories_) {
    if (!memory.error.defined()) continue;
    for (auto state = std::next(states.begin()); state != states.end(); ++state)
      memory.error.add_(state->at(kErrors).at(name).tensor());
    memory.error.div_(static_cast<double>(states.size()));
  }
}

/// Returns the memory of a matrix; loaded memory is moved to the bucket's device. All ranks have loaded the same names
/// and sizes, so all ranks throw or none does.
PowerSgd::Memory& PowerSgd::find_memory(const Matrix& matrix, const at::Tensor& buffer, const ProcessGroup& group) {
  const auto& name = matrix.name;
  if (checks_names_ && !memories_.count(name))
    throw UsageError(group.rank(), text("power_sgd: the loaded state has no entry for parameter '", name,
                                        "', but has one for '", *loaded_.begin(), "'; ", kOtherModel));
  loaded_.erase(name);
  auto& memory = memories_[name];
  const auto move = [&](at::Tensor& tensor, at::IntArrayRef sizes, const at::TensorOptions& options, const char* what) {
    if (!tensor.defined()) return;
    if (tensor.sizes() != sizes)
      throw UsageError(group.rank(), text("power_sgd: the loaded ", what, " of parameter '", name, "' is ",
                                          tensor.sizes(), ", expected ", sizes, "; ", kOtherModel));
    tensor = tensor.to(options);
  };
  move(memory.error, {matrix.n, matrix.m}, buffer.options(), "error");
  move(memory.factor, matrix.q.sizes(), matrix.q.options(), "factor");
  return memory;
}

void PowerSgd::check_all_loaded_used(const ProcessGroup& group) {
  if (std::exchange(checks_names_, false) && !loaded_.empty())
    throw UsageError(group.rank(), text("power_sgd: the loaded state has an entry for parameter '", *loaded_.begin(),
                                        "', which this hook does not compress; ", kOtherModel));
}

}  // namespace detail

PowerSgdState::PowerSgdState(const PowerSgdOptions& options) : impl_(std::make_shared<detail::PowerSgd>(options)) {}

CommHook PowerSgdState::hook() const {
  return AveragingHook{
      [impl = impl_](const GradientBucket& bucket, const ProcessGroup& group) { return impl->start(bucket, group); }};
}

Value PowerSgdState::state_dict() const {
  return impl_->save();
}

void PowerSgdState::load_state_dict(const Value& state) {
  impl_->load(state);
}

void PowerSgdState::load_rank_states(const std::vector<Value>& states, const ProcessGroup& group) {
  impl_->load(states, group);
}

CommHook power_sgd(const PowerSgdOptions& options) {
  return PowerSgdState(options).hook();
}

}  // namespace lockstep
