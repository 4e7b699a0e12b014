#pragma once

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/data/example.h>

#include <lockstep/export.h>
#include <lockstep/tensors_in.h>

namespace lockstep {

/// Makes a batch of samples, as DataLoader does unless it is given another way: tensors, and the tensors of LibTorch's
/// Examples, are stacked along a new first dimension; samples of other types stay a vector. Throws UsageError, which
/// names the sample, where two tensors differ in shape, type or device.
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
