// What a Reducer reports when a backward cannot be reduced.

#include "parallel/ddp/reducer.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/capture.h"
#include "comm/group/group.h"
#include "comm/strings.h"

namespace lockstep {

void Reducer::check_can_update() const {
  std::lock_guard lock(mutex_);
  const auto refuse = [&](const char* what, const char* remedy) {
    throw UsageError(group_.rank(), text("ZeroRedundancyOptimizer: the option overlap cannot be combined with ", what,
                                         " of DistributedDataParallel; ", remedy));
  };
  if (updater_)
    throw UsageError(group_.rank(),
                     "ZeroRedundancyOptimizer: another optimizer with the option overlap was constructed with this "
                     "DistributedDataParallel; wrap the model again");
  if (hook_) refuse("a comm hook", "register no hook, or leave overlap out");
  if (options_.allow_unused)
    refuse("the option find_unused_parameters",
           "leave one of them out: a parameter must not be updated in a step that does not use it");
  if (options_.check_finite)
    refuse("the option check_finite",
           "leave one of them out: a bad gradient is found only after other parameters are updated");
  if (options_.reduce_dtype)
    refuse("the option reduce_dtype", "leave one of them out: gradients are averaged in the dtype of the parameters");
  if (!options_.sparse_parameters.empty())
    refuse("sparse gradients", "set densify_sparse_gradients, or leave overlap out");
}

void Reducer::throw_interrupted_backward() const {
  in_place_.withdraw();
  throw UsageError(
      group_.rank(),
      "the last backward did not finish, so this rank left the others in the middle of a reduction; end the "
      "job and resume from a checkpoint (if backward recomputes the whole model: call forward on the wrapper and "
      "return tensors from it)");
}

void Reducer::throw_unexpected_gradient(size_t parameter) const {
  throw UsageError(group_.rank(),
                   text("parameter '", parameters_[parameter].name,
                        "' got a gradient, but no tensor that forward returned depends on it, so its bucket was "
                        "reduced without it; return from forward every tensor on which the loss depends"));
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

// The marks may be those of a deferred reduction, so the message does not tell which of the two this rank did.
void Reducer::check_frozen_alike() const {
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (marks_.frozen_differs(i))
      throw MismatchError(group_.rank(), text("parameter '", parameters_[i].name,
                                              "' was frozen on some ranks, but trained on others in the same step; "
                                              "call requires_grad_() for the same parameters on all ranks"));
}

// Skips the marks if the group is broken: the reduction may have been interrupted, and the next call throws the cause.
void Reducer::check_deferred() {
  std::lock_guard lock(mutex_);
  if (!options_.defers_marks || in_backward_ || detail::is_capturing(group_.device())) return;
  while (marks_.learn_deferred()) {
    if (detail::group_of(group_)->failure()) continue;
    check_frozen_alike();
    if (!needs_all_parameters()) continue;
    const auto unused = describe_unused(std::vector<char>(parameters_.size(), 1));  // this rank used all
    if (!unused.empty()) throw UsageError(group_.rank(), unused);
  }
}

/// Whether a parameter without a gradient is an error, after the first reduction was counted.
bool Reducer::needs_all_parameters() const {
  return !options_.allow_unused && (!options_.static_graph || (updater_ && reductions_ == 1));
}

/// Returns an error message, empty if every parameter was used on every rank. `used` tells which this rank has used.
std::string Reducer::describe_unused(const std::vector<char>& used) const {
  std::vector<std::string> here;
  std::vector<std::string> elsewhere;
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (marks_.unused_somewhere(i)) (used[i] ? elsewhere : here).push_back(text('\'', parameters_[i].name, '\''));
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
