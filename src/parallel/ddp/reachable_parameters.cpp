#include "parallel/ddp/reachable_parameters.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace lockstep {

using torch::autograd::Node;

void ReachableParameters::note(const std::vector<at::Tensor>& outputs, const std::vector<const Node*>& accumulators) {
  if (trust_ == Trust::kDistrusted) return;
  std::vector<const Node*> to_visit;
  std::unordered_set<const Node*> visited;
  const auto visit = [&](const Node* node) {
    if (node && visited.insert(node).second) to_visit.push_back(node);
  };
  for (const auto& output : outputs)
    if (output.requires_grad()) visit(output.grad_fn().get());
  const bool is_first = !std::exchange(has_forward_, true);
  is_known_ = !visited.empty() && (is_known_ || is_first);
  if (!is_known_) return;
  while (!to_visit.empty()) {
    const Node* node = to_visit.back();
    to_visit.pop_back();
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  for (size_t i = 0; i < reachable_.size(); ++i)
    if (accumulators[i] && visited.count(accumulators[i]) > 0) reachable_[i] = 1;
}

void ReachableParameters::compare(const std::vector<char>& got_gradient) {
  if (is_known_ && trust_ == Trust::kUnproven) {
    trust_ = Trust::kTrusted;
    for (size_t i = 0; i < reachable_.size(); ++i)
      if (got_gradient[i] && !reachable_[i]) trust_ = Trust::kDistrusted;
  }
  has_forward_ = is_known_ = false;
  std::fill(reachable_.begin(), reachable_.end(), 0);
}

}  // namespace lockstep
