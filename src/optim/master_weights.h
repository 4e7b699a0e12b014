#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

namespace lockstep::detail {

/// float32 copies of parameters in float16 or bfloat16. An optimizer updates the copies instead of the parameters. Not
/// thread-safe.
///
/// A parameter that is not the rounded copy was written by the program: by a collective, torch::load() or an operator
/// of LibTorch. The changed elements are copied to the master weight before the next update. On CPUs every such element
/// is found, because update() compares the values. On GPUs, where a comparison would make the host wait, a parameter is
/// compared if its version or its storage has changed; writes through parameter.data() and data_ptr() change neither.
class MasterWeights {
 public:
  /// Whether the parameter needs a copy.
  static bool is_for(const at::Tensor& parameter);

  /// Returns the copy of a parameter, which is dense. On a GPU, first copies the elements that the program has written
  /// to the parameter since the last round().
  const at::Tensor& of(const at::Tensor& parameter);
  /// Returns the copy as it is; undefined if there is none.
  at::Tensor find(const at::Tensor& parameter) const;
  void set(const at::Tensor& parameter, const at::Tensor& master);

  /// On a CPU: updates the copy of a parameter and writes it, rounded, into the parameter, in pieces that stay in a
  /// cache. update(begin, count, gradient) updates elements of the copy, in memory order, from a float32 gradient, on
  /// any of LibTorch's threads.
  using Update = std::function<void(int64_t begin, int64_t count, const void* gradient)>;
  void update(const at::Tensor& parameter, const at::Tensor& gradient, const Update& update);

  /// On GPUs: copies the elements that the program has written to the parameters since the last round(), before a
  /// captured step is replayed.
  void update_from_parameters();

  /// On GPUs: writes the copies, rounded, into the parameters.
  void round(const std::vector<at::Tensor>& parameters);

  void save(const torch::optim::Optimizer& optimizer, torch::serialize::OutputArchive& archive) const;
  /// An archive without copies removes the existing copies: the next step creates them from the parameters.
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
  static bool may_be_written(const Master& master);
  static void update_from_parameter(Master& master);
  std::unordered_map<const c10::TensorImpl*, Master> masters_;
};

/// Null for optimizers without master weights.
MasterWeights* masters_of(const torch::optim::Optimizer& optimizer);

}  // namespace lockstep::detail
