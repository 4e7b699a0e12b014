#pragma once

namespace lockstep {

/// A run of autograd's engine: one call of backward(). Recomputed segments call backward() inside of another.
struct BackwardTask {
  const void* id = nullptr;  // no other task that runs has it; null outside of backward
  int depth = 0;             // 0 for the outermost
  bool is_partial = false;   // towards some tensors only: autograd::grad, or backward with inputs
};

/// The task that the calling thread works for.
BackwardTask current_backward_task();

}  // namespace lockstep
