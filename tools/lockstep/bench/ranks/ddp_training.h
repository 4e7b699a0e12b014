#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/sequential.h>

#include <lockstep/process_group.h>

#include "bench/ranks/shared_page.h"

namespace lockstep::bench {

/// The model of this name, one of model_names(), with the same weights on every rank. python_rank.py has the same.
torch::nn::Sequential make_model(const std::string& name);

/// The shape of one sample.
std::vector<int64_t> input_shape(const std::string& model);

/// What the last layer tells apart.
inline constexpr int64_t kClasses = 10;

/// What a rank trains on: random, and always the same.
struct Batch {
  at::Tensor input;
  at::Tensor target;
};

Batch make_batch(const std::string& model, int rank);

/// A model, its optimizer and nothing else.
class Training {
 public:
  virtual ~Training() = default;

  /// Back to the weights and buffers that every training of this model begins with.
  virtual void reset() = 0;

  /// Forward, loss, backward and the optimizer's step, from no gradients at all. Collective where ranks talk.
  virtual void step(const Batch& batch) = 0;

  /// With the gradients of the last step.
  virtual std::vector<at::Tensor> parameters() const = 0;
};

/// On this rank alone.
std::unique_ptr<Training> make_local_training(const std::string& model);

/// With DistributedDataParallel over all ranks of the group. Collective.
std::unique_ptr<Training> make_ddp_training(const std::string& model, const ProcessGroup& group);

/// How many parameters get, in the first step of `ddp` on all ranks, another gradient than the mean of what `local`
/// computes for each rank's batch, by more than rounding explains. Collective, as a step of `ddp` is.
int64_t count_wrong_gradients(Training& ddp, Training& local, const std::string& model, int rank, int ranks);

/// How many of these tensors have other bits than rank 0's. Nothing of what is measured is asked. Collective.
int64_t count_diverged(const std::vector<at::Tensor>& tensors, SharedPage& page);

}  // namespace lockstep::bench
