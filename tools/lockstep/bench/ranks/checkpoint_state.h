#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/adamw.h>

#include <lockstep/training_state.h>
#include <lockstep/value.h>

#include "bench/checkpoint_plan.h"

namespace lockstep::bench {

/// A model and its AdamW, with values that depend on tensor and position. checkpoint_side.py creates the same state,
/// bit for bit.
class CheckpointState {
 public:
  explicit CheckpointState(const CheckpointPlan& plan);

  /// The model's and the optimizer's tensors, not copies of them.
  Value value() const;
  TrainingState training_state();
  std::vector<at::Tensor> tensors() const;

  /// The number of parameters whose tensors in `loaded` differ from those of this state. `loaded` has the layout of
  /// value(), written by lockstep or by Python.
  int64_t count_wrong(const Value& loaded) const;

 private:
  const std::shared_ptr<torch::nn::Module> model_;
  std::unique_ptr<torch::optim::AdamW> optimizer_;
};

/// Saves and loads as requested on stdin, until stdin ends. checkpoint_side.py does the same in Python. Prints one line
/// of JSON when the state is created, then answers each line on stdin with a line of JSON:
///
///     save FILE              the seconds of save_checkpoint
///     load FILE              the seconds of load_checkpoint, and the number of wrong tensors
///     load-unverified FILE   the same without verification
///     stall FOLDER           the seconds that asynchronous saves block, and the seconds of a copy in memory
void serve_checkpoints(const CheckpointPlan& plan);

}  // namespace lockstep::bench
