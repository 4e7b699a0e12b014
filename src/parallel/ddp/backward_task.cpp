#include "parallel/ddp/backward_task.h"

#include <cstddef>

#include <torch/csrc/autograd/graph_task.h>

namespace lockstep {

// Autograd gives away the addresses of two of the task's members, and not the task. Its depth is public, too, and
// stands at a known distance from them.
BackwardTask current_backward_task() {
  using torch::autograd::GraphTask;
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (!nodes) return {};
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
  const auto* task =
      reinterpret_cast<const GraphTask*>(reinterpret_cast<const char*>(nodes) - offsetof(GraphTask, nodes_in_graph_));
#pragma GCC diagnostic pop
  return {task, task->reentrant_depth_, !task->exec_info_.empty()};
}

}  // namespace lockstep
