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

/// Creates the model of this name, one of model_names(), with the same weights on every rank. python_rank.py creates
/// the same models.
torch::nn::Sequential make_model(const std::string& name);

/// The shape of one sample.
std::vector<int64_t> input_shape(const std::string& model);

/// Number of classes: outputs of the last layer.
inline constexpr int64_t kClasses = 10;

/// The batch of a rank: random, but the same in every run.
struct Batch {
  at::Tensor input;
  at::Tensor target;
};

Batch make_batch(const std::string& model, int rank);

/// A model with its optimizer.
class Training {
 public:
  virtual ~Training() = default;

  /// Restores the initial weights and buffers, which are the same for every training of this model.
  virtual void reset() = 0;

  /// Runs forward, loss, backward and the optimizer's step, starting without gradients. Collective if the ranks
  /// communicate.
  virtual void step(const Batch& batch) = 0;

  /// The parameters, with the gradients of the last step.
  virtual std::vector<at::Tensor> parameters() const = 0;
};

/// Training on this rank alone.
std::unique_ptr<Training> make_local_training(const std::string& model, const std::string& optimizer);

/// Training with DistributedDataParallel over all ranks of the group. Collective.
std::unique_ptr<Training> make_ddp_training(const std::string& model, const std::string& optimizer,
                                            const ProcessGroup& group);

/// The same with AdamW, parameters that all ranks share, and updates during backward. Collective.
std::unique_ptr<Training> make_shared_training(const std::string& model, const ProcessGroup& group);

/// Runs the same steps with both trainings, which have made equally many so far, and returns the number of parameters
/// that are not bitwise equal afterwards. Collective.
int64_t count_different_parameters(Training& one, Training& other, const Batch& batch);

/// Runs one step of `ddp` and returns the number of parameters whose gradient differs, by more than rounding, from the
/// mean of the gradients that `local` computes for the batches of all ranks. Collective, as a step of `ddp` is.
int64_t count_wrong_gradients(Training& ddp, Training& local, const std::string& model, int rank, int ranks);

/// The number of tensors that are not bitwise equal to those of rank 0. Uses only the shared page. Collective.
int64_t count_diverged(const std::vector<at::Tensor>& tensors, SharedPage& page);

}  // namespace lockstep::bench
