#pragma once

#include <ATen/core/Tensor.h>

#include <lockstep/work.h>

namespace lockstep::detail {

/// From now on, LibTorch's operators on this thread wait for `arrival` before they use `memory`, or a view of it, until
/// it is complete: on a CPU they block, on a GPU the current stream waits. An error of `arrival` is not thrown there:
/// wait for it yourself before results are used. Code that reads memory without an operator does not wait.
void wait_on_first_use(const at::Tensor& memory, const Work& arrival);

}  // namespace lockstep::detail
