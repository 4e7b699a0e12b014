#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::bench {

/// A float32 parameter of the model that is saved.
struct SavedParameter {
  std::string name{};
  std::vector<int64_t> sizes{};

  int64_t bytes() const;
  bool operator==(const SavedParameter&) const = default;
};

/// The state that `lockstep bench checkpoint` saves and loads. AdamW has two more tensors of the size of each
/// parameter, and a step count.
struct CheckpointPlan {
  std::vector<SavedParameter> parameters{};
  int threads = 1;  // of each side
  int rounds = 5;
  bool check = true;

  int64_t parameter_bytes() const;
  /// The bytes of the parameters and of AdamW's state.
  int64_t state_bytes() const { return 3 * parameter_bytes(); }
};

/// The fewest bytes of parameters that plan_parameters accepts.
inline constexpr int64_t kMinParameterBytes = 1 << 20;

/// The parameters of a GPT with close to `bytes` bytes: 16 to 64 layers whose width grows with the size, so that there
/// are a few hundred matrices and small vectors. With 1 GiB, a layer has matrices of 4, 12, 16 and 16 MiB. Pure.
std::vector<SavedParameter> plan_parameters(int64_t bytes);

/// The plan as JSON, for the processes that save and load.
std::string to_text(const CheckpointPlan& plan);
CheckpointPlan checkpoint_plan_from(const std::string& text);

}  // namespace lockstep::bench
