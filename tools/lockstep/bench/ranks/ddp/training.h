#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/process_group.h>

namespace lockstep::bench {

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

}  // namespace lockstep::bench
