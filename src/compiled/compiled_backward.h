#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "compiled/description.h"
#include "compiled/loaded_graph.h"

namespace lockstep::detail {

/// Makes the outputs of forward part of autograd's graph, with one node that runs the graph of backward for
/// description->sizes[sizes]. `arguments` are forward's: parameters, buffers and inputs. `results` are all results of
/// its graph. Buffers that forward writes may change afterwards. If another argument changes before backward, backward
/// throws UsageError, which names it.
void connect_backward(const std::shared_ptr<const CompiledDescription>& description, size_t sizes,
                      const std::vector<at::Tensor>& arguments, const std::vector<at::Tensor>& results,
                      std::shared_ptr<LoadedGraph> graph);

}  // namespace lockstep::detail
