#pragma once

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/data/example.h>

#include <lockstep/export.h>
#include <lockstep/tensors_in.h>

namespace lockstep {

/// Makes a batch from samples; DataLoader's default collate function. Stacks tensors, and the tensors in LibTorch's
/// Examples, along a new first dimension. Returns samples of other types as a vector. Throws UsageError, which names
/// the sample, if two tensors differ in shape, dtype or device. Thread-safe.
struct LOCKSTEP_EXPORT Stack {
  at::Tensor operator()(std::vector<at::Tensor> samples) const;
  torch::data::Example<> operator()(std::vector<torch::data::Example<>> samples) const;
  torch::data::TensorExample operator()(std::vector<torch::data::TensorExample> samples) const;
  template <class Sample>
  std::vector<Sample> operator()(std::vector<Sample> samples) const {
    return samples;
  }
};

template <class Data, class Target>
struct TensorsIn<torch::data::Example<Data, Target>> {
  static constexpr bool kAny = TensorsIn<Data>::kAny || TensorsIn<Target>::kAny;
  template <class Visit>
  static void visit(torch::data::Example<Data, Target>& example, const Visit& function) {
    TensorsIn<Data>::visit(example.data, function);
    TensorsIn<Target>::visit(example.target, function);
  }
};

template <class Data>
struct TensorsIn<torch::data::Example<Data, torch::data::example::NoTarget>> {
  static constexpr bool kAny = TensorsIn<Data>::kAny;
  template <class Visit>
  static void visit(torch::data::Example<Data, torch::data::example::NoTarget>& example, const Visit& function) {
    TensorsIn<Data>::visit(example.data, function);
  }
};

}  // namespace lockstep
