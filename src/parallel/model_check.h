#pragma once

#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/process_group.h>

namespace lockstep {

/// One parameter, buffer or option as the ranks compare it.
struct ModelFact {
  std::string name;         // "parameter 'fc.weight'"
  std::string description;  // "[10, 84] Float"

  friend bool operator==(const ModelFact&, const ModelFact&) = default;
};

std::vector<ModelFact> describe_model(const torch::nn::Module& module);

/// How the first difference between two ranks' models reads; empty when there is none.
std::string first_difference(const std::vector<ModelFact>& mine, int my_rank, const std::vector<ModelFact>& theirs,
                             int their_rank);

/// Why this group cannot train the model on this rank; empty when it can.
std::string why_not_trainable(const torch::nn::Module& module, const ProcessGroup& group);

/// Collective, and throws on all ranks or on none: UsageError when the model cannot be trained on some rank,
/// MismatchError naming the first difference unless all ranks have the same model and the same options.
void check_model(const torch::nn::Module& module, const std::vector<ModelFact>& options, const ProcessGroup& group);

}  // namespace lockstep
