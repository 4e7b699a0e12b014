#pragma once

#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

namespace lockstep::detail {

/// float32 copies of parameters in float16 or bfloat16, which an optimizer updates in their place. Not thread-safe.
///
/// A parameter that is not the rounded copy was written by the program: by a collective, torch::load() or an operator
/// of LibTorch. On CPUs every such parameter is found, because the values are compared. On GPUs, where a comparison
/// would make the host wait, a parameter is compared if its version or its storage has changed; writes through
/// parameter.data() and data_ptr() change neither.
class MasterWeights {
 public:
  /// Whether the parameter needs a copy.
  static bool is_for(const at::Tensor& parameter);

  /// Returns the copy of a parameter. If the program has written into the parameter since the last round(), takes over
  /// the elements that it changed.
  const at::Tensor& of(const at::Tensor& parameter);
  /// Returns the copy as it is; undefined if there is none.
  at::Tensor find(const at::Tensor& parameter) const;
  void set(const at::Tensor& parameter, const at::Tensor& master);

  /// Takes over what the program has written into the parameters since the last round(), before a captured step is
  /// replayed.
  void take_over_writes();

  /// Writes the copies, rounded, into the parameters.
  void round(const std::vector<at::Tensor>& parameters);

  void save(const torch::optim::Optimizer& optimizer, torch::serialize::OutputArchive& archive) const;
  /// An archive without copies leaves none: the next step takes the values of the parameters.
  void load(const torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive);

 private:
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;  // a new storage never compares equal to an old one
  struct Master {
    at::Tensor tensor;
    at::Tensor parameter;
    // Of the parameter, when it was equal to the rounded copy:
    uint64_t version = 0;
    std::optional<WeakStorage> storage{};
    int64_t offset = 0;  // in the storage
  };
  static void note_equal(Master& master);
  static bool is_written(const Master& master);
  static void take_over(Master& master);
  std::unordered_map<const c10::TensorImpl*, Master> masters_;
};

/// Null for optimizers without master weights.
MasterWeights* masters_of(const torch::optim::Optimizer& optimizer);

}  // namespace lockstep::detail
