#pragma once

#include <memory>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <lockstep/export.h>

namespace lockstep {

namespace detail {
class DeviceState;
}

// LibTorch's optimizers, with its options, states and archives, but with another step: on a CPU one pass over memory
// for each parameter, on a GPU a few kernels for all of them (LibTorch 2.3 and later; before that LibTorch's own step).
// Their steps can be captured in a CUDA graph once they have run: what changes from step to step, learning rate and
// step number, is then in the GPU's memory. CapturedStep does the rest; with a graph of your own call before_replay().
//
// Parameters are of float32, float64, float16 or bfloat16, on CPUs or CUDA devices, with dense gradients, and each is
// given once; anything else is a UsageError before a parameter changes. On a GPU learning rates are float32, also for
// parameters of float64. Not thread-safe. Not movable.

class LOCKSTEP_EXPORT FusedAdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  ~FusedAdamW() override;

  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  /// Tells the GPU of learning rates that have changed since. Does not wait for it. UsageError when a state was loaded
  /// since the capture.
  void before_replay();

 private:
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
