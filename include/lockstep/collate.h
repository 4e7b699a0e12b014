#pragma once

#include <algorithm>
#include <concepts>
#include <map>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/data/example.h>

#include <lockstep/export.h>
#include <lockstep/tensors_in.h>

namespace lockstep {

namespace detail {

/// A struct that consists of tensors, which its function tensors() lists.
template <class T>
inline constexpr size_t kBytesOfTensors = 0;
template <std::same_as<at::Tensor>... Items>
inline constexpr size_t kBytesOfTensors<std::tuple<Items&...>> = sizeof...(Items) * sizeof(at::Tensor);
template <class T>
concept ConsistsOfTensors = ListsTensors<T> && kBytesOfTensors<decltype(std::declval<T&>().tensors())>
== sizeof(T);

[[noreturn]] LOCKSTEP_EXPORT void refuse_other_keys(size_t sample);

}  // namespace detail

/// Makes a batch from samples; DataLoader's default collate function. A batch has the structure of a sample:
///   - tensors are stacked along a new first dimension, also those in LibTorch's Examples and in a struct that consists
///     of tensors and lists all of them in tensors() (see TensorsIn),
///   - numbers become a tensor of their dtype,
///   - pairs, tuples and maps are collated item by item; all maps of a batch must have the same keys,
///   - samples of other types, for example strings, become a vector.
/// Throws UsageError, which names the sample, if two tensors differ in shape, dtype or device. Thread-safe.
struct LOCKSTEP_EXPORT Stack {
  at::Tensor operator()(std::vector<at::Tensor> samples) const;
  torch::data::Example<> operator()(std::vector<torch::data::Example<>> samples) const;
  torch::data::TensorExample operator()(std::vector<torch::data::TensorExample> samples) const;

  template <class Sample>
  std::vector<Sample> operator()(std::vector<Sample> samples) const {
    return samples;
  }

  template <class Sample>
  requires std::is_arithmetic_v<Sample> at::Tensor operator()(std::vector<Sample> samples) const {
    auto numbers = at::empty({static_cast<int64_t>(samples.size())}, c10::CppTypeToScalarType<Sample>::value);
    std::copy(samples.begin(), samples.end(), static_cast<Sample*>(numbers.data_ptr()));
    return numbers;
  }

  template <detail::ConsistsOfTensors Sample>
  Sample operator()(std::vector<Sample> samples) const {
    Sample batch = samples.at(0);
    auto members = batch.tensors();
    stack_members(members, samples, std::make_index_sequence<std::tuple_size_v<decltype(members)>>());
    return batch;
  }

  template <class First, class Second>
  auto operator()(std::vector<std::pair<First, Second>> samples) const {
    return std::pair((*this)(items<0, First>(samples)), (*this)(items<1, Second>(samples)));
  }

  template <class... Items>
  auto operator()(std::vector<std::tuple<Items...>> samples) const {
    return [&]<size_t... place>(std::index_sequence<place...>) {
      return std::tuple((*this)(items<place, Items>(samples))...);
    }
    (std::index_sequence_for<Items...>());
  }

  template <class Key, class Item>
  auto operator()(std::vector<std::map<Key, Item>> samples) const {
    std::map<Key, decltype((*this)(std::vector<Item>()))> batch;
    for (const auto& [key, item] : samples.at(0)) {
      std::vector<Item> column;
      for (size_t i = 0; i < samples.size(); ++i) {
        const auto found = samples[i].find(key);
        if (found == samples[i].end() || samples[i].size() != samples[0].size()) detail::refuse_other_keys(i);
        column.push_back(found->second);
      }
      batch.emplace(key, (*this)(std::move(column)));
    }
    return batch;
  }

 private:
  template <size_t place, class Item, class Sample>
  static std::vector<Item> items(std::vector<Sample>& samples) {
    std::vector<Item> column;
    column.reserve(samples.size());
    for (auto& sample : samples) column.push_back(std::move(std::get<place>(sample)));
    return column;
  }

  template <class Members, class Sample, size_t... place>
  void stack_members(Members& members, std::vector<Sample>& samples, std::index_sequence<place...>) const {
    ((std::get<place>(members) = (*this)(tensors_at<place>(samples))), ...);
  }
  template <size_t place, class Sample>
  static std::vector<at::Tensor> tensors_at(std::vector<Sample>& samples) {
    std::vector<at::Tensor> column;
    for (auto& sample : samples) column.push_back(std::get<place>(sample.tensors()));
    return column;
  }
};

struct PadOptions {
  double value = 0;            ///< In the data, after the end of a sequence.
  double target_value = -100;  ///< In the targets; by default the value that cross_entropy ignores.
  int64_t multiple_of = 1;     ///< The longest length is rounded up to a multiple, for example of 8.
};

/// A batch of sequences of different lengths.
struct LOCKSTEP_EXPORT PaddedBatch {
  at::Tensor data;     ///< [samples, longest, ...]
  at::Tensor target;   ///< Padded like the data if each target is as long as its data, else stacked. May be undefined.
  at::Tensor lengths;  ///< [samples], int64

  /// Returns [samples, longest], true where the data is not padding.
  at::Tensor mask() const;
  auto tensors() { return std::tie(data, target, lengths); }
};

/// A collate function for sequences: tensors, or Examples whose data is a tensor, that differ in their first dimension.
///
///     lockstep::DataLoader loader(sentences, sampler, lockstep::Pad({.multiple_of = 8}), {.batch_size = 32});
///     for (auto& batch : loader) train(batch.data, batch.mask(), batch.target);
///
/// Throws UsageError, which names the sample, if two samples differ in another dimension, dtype or device.
/// similar_length_order() keeps the padding small. Thread-safe.
class LOCKSTEP_EXPORT Pad {
 public:
  explicit Pad(PadOptions options = {});
  PaddedBatch operator()(std::vector<at::Tensor> samples) const;
  PaddedBatch operator()(std::vector<torch::data::Example<>> samples) const;

 private:
  PadOptions options_;  // constant after construction
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
