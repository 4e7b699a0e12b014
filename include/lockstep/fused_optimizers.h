#pragma once

#include <utility>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <lockstep/detail/fused_state.h>
#include <lockstep/export.h>

namespace lockstep {

/// An optimizer whose step a value on the GPU can skip. GradScaler uses it.
class LOCKSTEP_EXPORT SkippableStep {
 public:
  virtual ~SkippableStep() = default;
  /// Makes a step unless `skip`, a float32 tensor with one element that is 0 or 1, is 1. The host does not wait for the
  /// GPU, except in the first step. Can be captured in a CUDA graph as step() can.
  virtual void step_unless(const at::Tensor& skip) = 0;
};

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
//
// keep_master_weights(), before the first step, is for parameters in float16 or bfloat16, in which a small update is
// lost to rounding: the optimizer keeps a float32 copy of each such parameter, updates the copy, with a state in
// float32, and rounds it to the parameter. The copies are saved with the state, as "master_param". Values that the
// program writes into a parameter (loading, broadcasts) are taken over in the next step. On GPUs, writes through data()
// or data_ptr() are not noticed, and the next step undoes them. See WithMasterWeights.

class LOCKSTEP_EXPORT FusedAdamW : public torch::optim::AdamW, public SkippableStep {
 public:
  using torch::optim::AdamW::AdamW;
  ~FusedAdamW() override;

  at::Tensor step(LossClosure closure = nullptr) override;
  void step_unless(const at::Tensor& skip) override;
  void keep_master_weights();
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  /// Copies changed learning rates to the GPU, and updates master weights of parameters that the program has written.
  /// Does not block. Throws UsageError if a state was loaded after the capture.
  void before_replay();

 private:
  detail::FusedState fused_;
  friend struct detail::FusedAccess;
};

class LOCKSTEP_EXPORT FusedAdam : public torch::optim::Adam, public SkippableStep {
 public:
  using torch::optim::Adam::Adam;
  ~FusedAdam() override;

  at::Tensor step(LossClosure closure = nullptr) override;
  void step_unless(const at::Tensor& skip) override;
  void keep_master_weights();
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  void before_replay();

 private:
  detail::FusedState fused_;
  friend struct detail::FusedAccess;
};

class LOCKSTEP_EXPORT FusedSGD : public torch::optim::SGD, public SkippableStep {
 public:
  using torch::optim::SGD::SGD;
  ~FusedSGD() override;

  at::Tensor step(LossClosure closure = nullptr) override;
  void step_unless(const at::Tensor& skip) override;
  void keep_master_weights();
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  void before_replay();

 private:
  detail::FusedState fused_;
  friend struct detail::FusedAccess;
};

/// A fused optimizer that keeps master weights from the start. For ZeroRedundancyOptimizer, which constructs its inner
/// optimizer itself: ZeroRedundancyOptimizer<WithMasterWeights<FusedAdamW>>.
template <class Fused>
class WithMasterWeights : public Fused {
 public:
  template <class... Args>
  explicit WithMasterWeights(Args&&... args) : Fused(std::forward<Args>(args)...) {
    this->keep_master_weights();
  }
};

}  // namespace lockstep
