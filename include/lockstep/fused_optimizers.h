#pragma once

#include <memory>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <lockstep/export.h>

namespace lockstep {

namespace detail {
class DeviceState;
/// Copies the step counts of a fused optimizer from the GPU to its states. Does nothing for other optimizers.
void read_step_counts(const torch::optim::Optimizer& optimizer);
}  // namespace detail

// LibTorch's optimizers with a faster step(). Options, states and archives are the same as LibTorch's. On a CPU a step
// is one pass over memory for each parameter; on a GPU it is a few kernels for all parameters (LibTorch 2.3 or later;
// older versions use LibTorch's own step).
//
// After the first step, the learning rate and the step count are in GPU memory, so later steps can be captured in a
// CUDA graph. CapturedStep handles replays; with your own CUDA graph, call before_replay() before each replay.
//
// Parameters are float32, float64, float16 or bfloat16, on a CPU or CUDA device, with dense gradients, and each is
// listed once. Otherwise step() throws UsageError before it changes a parameter. On a GPU learning rates are float32,
// even for float64 parameters. Not collective. Not thread-safe. Not movable.

class LOCKSTEP_EXPORT FusedAdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  ~FusedAdamW() override;

  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  /// Copies changed learning rates to the GPU. Does not block. Throws UsageError if a state was loaded after the
  /// capture.
  void before_replay();

 private:
  friend void detail::read_step_counts(const torch::optim::Optimizer&);
  std::shared_ptr<detail::DeviceState> device_;
};

class LOCKSTEP_EXPORT FusedAdam : public torch::optim::Adam {
 public:
  using torch::optim::Adam::Adam;
  ~FusedAdam() override;

  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  void before_replay();

 private:
  friend void detail::read_step_counts(const torch::optim::Optimizer&);
  std::shared_ptr<detail::DeviceState> device_;
};

class LOCKSTEP_EXPORT FusedSGD : public torch::optim::SGD {
 public:
  using torch::optim::SGD::SGD;
  ~FusedSGD() override;

  at::Tensor step(LossClosure closure = nullptr) override;
  void load(torch::serialize::InputArchive& archive) override;
  void before_replay();

 private:
  std::shared_ptr<detail::DeviceState> device_;
};

}  // namespace lockstep
