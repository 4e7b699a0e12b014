#include "parallel/ddp/parameter_watch.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include <ATen/record_function.h>

namespace lockstep::detail {
namespace {

using Target = ParameterWatch::Target;

/// Operators that end in "_" but make no step: copies, and operators that change a tensor's properties only.
constexpr std::array<std::string_view, 15> kNoSteps{
    "aten::copy_",      "aten::_foreach_copy_", "aten::detach_",   "aten::requires_grad_", "aten::set_",
    "aten::resize_",    "aten::resize_as_",     "aten::rename_",   "aten::as_strided_",    "aten::t_",
    "aten::transpose_", "aten::swapaxes_",      "aten::swapdims_", "aten::squeeze_",       "aten::unsqueeze_"};

/// LibTorch calls before_operator() as long as the thread has a target.
thread_local std::vector<std::shared_ptr<Target>> targets_of_thread;
thread_local int collectives_of_thread = 0;  // collectives that this thread is executing

bool is_parameter(const Target& target, const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() &&
         std::any_of(target.parameters->begin(), target.parameters->end(), [&](const at::Tensor& parameter) {
           return parameter.has_storage() && parameter.is_alias_of(tensor);
         });
}

bool has_parameter(const Target& target, const c10::IValue& value) {
  if (value.isTensor()) return is_parameter(target, value.toTensor());
  if (!value.isList()) return false;
  const auto items = value.toListRef();
  return std::any_of(items.begin(), items.end(), [&](const c10::IValue& item) { return has_parameter(target, item); });
}

bool is_collective(const at::RecordFunction& call) {
  const std::string_view name = call.name();
  return name.starts_with("lockstep::") && !name.ends_with("::step");
}

/// Returns the tensor, or the list of tensors, that the operator changes; null if none is known. In-place operators and
/// steps of lockstep's optimizers have it as the first input, variants with the overload "out" as the last one.
const c10::IValue* changed_by(const at::RecordFunction& call) {
  const auto inputs = call.inputs();
  if (inputs.empty()) return nullptr;
  const std::string_view name = call.name();
  if (name.ends_with('_') || name.ends_with("::step"))
    return std::find(kNoSteps.begin(), kNoSteps.end(), name) == kNoSteps.end() ? &inputs.front() : nullptr;
  if (!inputs.back().isTensor()) return nullptr;
  const auto full_name = call.operator_name();
  return full_name && full_name->overload_name.ends_with("out") ? &inputs.back() : nullptr;
}

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& call);
void after_operator(const at::RecordFunction& call, at::ObserverContext* /*context*/) {
  if (collectives_of_thread > 0 && is_collective(call)) --collectives_of_thread;
}

/// The callback of this thread, or 0. Autograd restores a thread's callbacks after each node of a graph, also callbacks
/// that were removed inside of the node, so only LibTorch knows whether there is a callback.
at::CallbackHandle installed_callback() {
  for (const auto& entry : at::get_record_function_tls_().sorted_tls_callbacks_)
    if (entry.callback_.start() == &before_operator) return entry.handle_;
  return 0;
}

/// Removes the targets that are no longer watched, and the callback if none is left.
void drop_targets_that_are_over() {
  std::erase_if(targets_of_thread, [](const auto& target) { return !target->is_watched; });
  if (!targets_of_thread.empty()) return;
  if (const auto handle = installed_callback(); handle != 0) at::removeCallback(handle);
  collectives_of_thread = 0;
}

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& call) {
  if (is_collective(call)) ++collectives_of_thread;
  if (collectives_of_thread > 0) return nullptr;
  if (const auto* changed = changed_by(call)) {
    for (const auto& target : targets_of_thread) {
      if (!target->is_watched || !has_parameter(*target, *changed)) continue;
      target->is_found = true;
      target->is_watched = false;
    }
  }
  drop_targets_that_are_over();
  return nullptr;
}

}  // namespace

ParameterWatch::ParameterWatch(std::vector<at::Tensor> parameters)
    : parameters_(std::make_shared<const std::vector<at::Tensor>>(std::move(parameters))) {}

ParameterWatch::~ParameterWatch() {
  end();
}

void ParameterWatch::begin() {
  end();
  if (has_found_) return;
  target_ = std::make_shared<Target>(parameters_);
  targets_of_thread.push_back(target_);
  if (installed_callback() != 0) return;
  collectives_of_thread = 0;
  at::addThreadLocalCallback(at::RecordFunctionCallback(&before_operator, &after_operator)
                                 .needsInputs(true)
                                 .scopes({at::RecordScope::FUNCTION}));
}

void ParameterWatch::end() {
  if (!target_) return;
  target_->is_watched = false;
  has_found_ = has_found_step();
  target_.reset();
  drop_targets_that_are_over();
}

bool ParameterWatch::has_found_step() const {
  return has_found_ || (target_ && target_->is_found);
}

void ParameterWatch::forget() {
  has_found_ = false;
  if (target_) target_->is_found = false;
}

}  // namespace lockstep::detail
