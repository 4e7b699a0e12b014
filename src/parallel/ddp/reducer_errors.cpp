#include "parallel/ddp/reducer_errors.h"

#include <vector>

#include <c10/core/GradMode.h>

#include "base/text.h"
#include "comm/strings.h"

namespace lockstep {

UsageError interrupted_backward(int rank) {
  return UsageError(
      rank,
      "the last backward did not finish, so this rank left the others in the middle of a reduction; end the "
      "job and resume from a checkpoint (if backward recomputes the whole model: call forward on the wrapper and "
      "return tensors from it)");
}

UsageError forward_in_backward(int rank) {
  return UsageError(rank,
                    "forward was called during backward of the same wrapper (in a hook?), whose gradients are being "
                    "averaged; call it "
                    "after backward, or compute a part of the model again in backward with recompute()");
}

UsageError unexpected_gradient(int rank, const std::string& parameter) {
  return UsageError(rank, text("parameter '", parameter,
                               "' got a gradient, but no tensor that forward returned depends on it, so its bucket was "
                               "reduced without it; return from forward every tensor on which the loss depends"));
}

// The reduction overwrites gradients in place, which autograd cannot differentiate.
void refuse_create_graph(int rank) {
  if (c10::GradMode::is_enabled())
    throw UsageError(
        rank,
        "backward was called with create_graph, but gradients lose their graph when they are averaged over "
        "the ranks; compute the inner gradients with torch::autograd::grad(..., create_graph), add the "
        "terms that use them to the loss, and call backward without create_graph");
}

// All ranks know that some gradient is not finite, but only the affected ranks know which.
void throw_not_finite(const ProcessGroup& group, const std::string& own_parameter, int64_t reductions) {
  const auto names = all_gather_strings(group, own_parameter);
  std::vector<std::string> findings;
  for (size_t rank = 0; rank < names.size(); ++rank)
    if (!names[rank].empty()) findings.push_back(text("of parameter '", names[rank], "' on rank ", rank));
  throw Error(group.rank(),
              text("backward number ", reductions, " gave gradients that are NaN or infinite: ", enumerate(findings),
                   " (the first on each rank); lower the learning rate, clip gradients, or check the input"));
}

}  // namespace lockstep
