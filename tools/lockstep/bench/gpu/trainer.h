#pragma once

#include <cstdint>
#include <string>

#include "bench/companion.h"
#include "bench/gpu/row.h"

namespace lockstep::bench {

/// A process that trains one model after the other on the GPU: lockstep-bench, or gpu_trainer.py.
class Trainer {
 public:
  Trainer(GpuSide side, std::vector<std::string> command) : side_(side), process_(name_of(side), std::move(command)) {}

  GpuSide side() const { return side_; }

  /// Returns when it has a GPU: the version of its torch. All of these throw PeerError when the process has ended.
  std::string await_ready() { return process_.await_answer(); }
  /// From its first weights, with as much memory as it then needs.
  void take_model(const std::string& model) { process_.ask("model " + model); }
  /// Returns when the GPU is done: the loss of the last step.
  double train(int steps) { return std::stod(process_.ask("train " + std::to_string(steps))); }
  /// The most memory that this model has needed.
  int64_t peak_bytes() { return std::stoll(process_.ask("peak")); }
  /// Gives its memory back.
  void drop_model() { process_.ask("drop"); }

 private:
  const GpuSide side_;
  Companion process_;
};

}  // namespace lockstep::bench
