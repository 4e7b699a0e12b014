#include "parallel/ddp/parameter_usage.h"

#include <algorithm>
#include <utility>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/capture.h"
#include "comm/group/group.h"
#include "comm/strings.h"

namespace lockstep {

ParameterUsage::ParameterUsage(const std::vector<NamedParameter>& parameters, ProcessGroup group, bool defers_marks)
    : parameters_(parameters),
      group_(std::move(group)),
      defers_marks_(defers_marks),
      used_(parameters.size()),
      trained_in_forward_(parameters.size()),
      frozen_(parameters.size()),
      marks_(parameters.size()),
      reachable_(parameters.size()) {}

// --- forward

void ParameterUsage::begin_forward() {
  in_forward_ = true;
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (parameters_[i].tensor.requires_grad()) trained_in_forward_[i] = 1;
}

void ParameterUsage::end_forward(const std::vector<at::Tensor>& outputs,
                                 const std::vector<const torch::autograd::Node*>& accumulators) {
  reachable_.note(outputs, accumulators);
}

void ParameterUsage::forget_forwards() {
  in_forward_ = false;
  std::fill(trained_in_forward_.begin(), trained_in_forward_.end(), 0);
}

// --- backward

// A gradient that was accumulated under no_sync() is reduced even if the parameter is frozen now. A parameter that was
// frozen in all forwards gets no gradient, although it may be trained again when backward runs.
bool ParameterUsage::was_frozen(size_t parameter) const {
  if (used_[parameter]) return false;
  return !parameters_[parameter].tensor.requires_grad() || (in_forward_ && !trained_in_forward_[parameter]);
}

bool ParameterUsage::are_all_frozen() const {
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (!was_frozen(i)) return false;
  return true;
}

void ParameterUsage::begin_backward() {
  for (size_t i = 0; i < parameters_.size(); ++i) frozen_[i] = was_frozen(i);
}

// --- the reduction

void ParameterUsage::write_marks(Bucket& last, bool is_finite, bool is_static_graph) {
  marks_.write(last, used_, frozen_, is_finite, is_static_graph);
}

void ParameterUsage::begin_shadow() {
  std::fill(frozen_.begin(), frozen_.end(), 0);
}

bool ParameterUsage::has_unused() const {
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (!used_[i] && !frozen_[i]) return true;
  return false;
}

// A rank that used every parameter does not need the other ranks' marks immediately. Replays of a captured step do not
// run this code, so the marks of the captured reduction are not read.
void ParameterUsage::read_marks(const Bucket& last, bool at_once) {
  if (at_once || !defers_marks_ || has_unused())
    marks_.read_marks(last);
  else if (detail::is_capturing(group_.device()))
    marks_.assume_equal_marks();
  else
    marks_.defer(last);
}

void ParameterUsage::end_reduction(bool needs_all) {
  const auto unused = needs_all ? describe_unused(used_) : "";
  std::fill(used_.begin(), used_.end(), 0);
  forget_forwards();
  check_frozen_alike();
  if (!unused.empty()) throw UsageError(group_.rank(), unused);
}

void ParameterUsage::end_shadow(bool needs_all) {
  const auto unused = needs_all ? describe_unused(std::vector<char>(used_.size(), 1)) : "";
  std::fill(used_.begin(), used_.end(), 0);
  if (!unused.empty()) throw UsageError(group_.rank(), unused);
}

// Skips the marks if the group is broken: the reduction may have been interrupted, and the next call throws the cause.
void ParameterUsage::check_deferred(bool needs_all) {
  if (!defers_marks_ || detail::is_capturing(group_.device())) return;
  while (marks_.read_deferred_marks()) {
    if (detail::group_of(group_)->failure()) continue;
    check_frozen_alike();
    if (!needs_all) continue;
    const auto unused = describe_unused(std::vector<char>(used_.size(), 1));  // this rank used all parameters
    if (!unused.empty()) throw UsageError(group_.rank(), unused);
  }
}

void ParameterUsage::abandon() {
  std::fill(used_.begin(), used_.end(), 0);
  marks_ = UnusedParameterBitmap(parameters_.size());
}

// --- errors

// The marks may be those of a deferred reduction, so the message does not say whether this rank froze the parameter.
void ParameterUsage::check_frozen_alike() const {
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (marks_.frozen_differs(i))
      throw MismatchError(group_.rank(), text("parameter '", parameters_[i].name,
                                              "' was frozen on some ranks, but trained on others in the same step; "
                                              "call requires_grad_() for the same parameters on all ranks"));
}

/// Returns an error message, empty if every parameter was used on every rank. `used`: by parameter, whether this rank
/// has used it.
std::string ParameterUsage::describe_unused(const std::vector<char>& used) const {
  std::vector<std::string> unused_here;
  std::vector<std::string> unused_elsewhere;
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (marks_.unused_somewhere(i))
      (used[i] ? unused_elsewhere : unused_here).push_back(text('\'', parameters_[i].name, '\''));
  if (unused_here.empty() && unused_elsewhere.empty()) return {};
  if (unused_here.size() == parameters_.size())
    return "backward gave no gradient to any parameter of the wrapped model, so the loss does not depend on them; "
           "compute the loss from the wrapper's output, without detach() or NoGradGuard";
  auto sentence = [](const std::vector<std::string>& names, const char* where) {
    return names.empty() ? std::string() : text("no gradient ", where, " for ", enumerate(names), "; ");
  };
  return text("backward gave ", sentence(unused_here, "on this rank"), sentence(unused_elsewhere, "on another rank"),
              "use every parameter in the loss, or wrap with {.find_unused_parameters = true}");
}

}  // namespace lockstep
