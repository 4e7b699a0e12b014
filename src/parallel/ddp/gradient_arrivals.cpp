#include "parallel/ddp/gradient_arrivals.h"

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {

void GradientArrivals::begin() {
  order_.clear();
  for (auto& count : counts_) count.arrived = 0;
}

bool GradientArrivals::add(size_t parameter) {
  order_.push_back(parameter);
  auto& [arrived, expected] = counts_[parameter];
  ++arrived;
  if (is_static_graph_ && !is_recorded()) return false;
  if (is_static_graph_) {
    if (arrived > expected)
      throw UsageError(
          rank_, text("parameter '", parameters_[parameter].name, "' got ", arrived, " gradients in one backward, but ",
                      expected, " in the first one; the graph is not static: wrap without static_graph"));
    return arrived == expected;
  }
  if (arrived > 1)
    throw UsageError(
        rank_, text("parameter '", parameters_[parameter].name,
                    "' got a second gradient in one backward, after the first was already handed to the reduction; run "
                    "all but the last of such backward passes under no_sync(), or wrap with {.static_graph = true} if "
                    "checkpointed segments share the parameter"));
  return true;
}

void GradientArrivals::end() {
  if (!has_ended_)
    for (auto& count : counts_) count.expected = count.arrived;
  has_ended_ = true;
}

}  // namespace lockstep
