#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/detail/tensor_members.h>

namespace lockstep {

/// Finds the tensors in a value, for example in a module's arguments or results. `visit` calls the function with a
/// reference to each defined tensor. Finds tensors in tuples, pairs, vectors, arrays, optionals and maps, nested to any
/// depth. `kAny` is false for types that cannot contain tensors.
///
/// Your own struct lists its members in a function `tensors()` that returns references to them:
///
///   struct Batch {
///     torch::Tensor tokens, mask;
///     std::vector<torch::Tensor> images;
///     auto tensors() { return std::tie(tokens, mask, images); }
///   };
///
/// If you cannot change the struct, specialize this template for it.
template <class T>
struct TensorsIn {
  static constexpr bool kAny = false;
  template <class Visit>
  static void visit(T&, const Visit&) {}
};

template <>
struct TensorsIn<at::Tensor> {
  static constexpr bool kAny = true;
  template <class Visit>
  static void visit(at::Tensor& tensor, const Visit& function) {
    if (tensor.defined()) function(tensor);
  }
};

template <detail::ListsTensors T>
struct TensorsIn<T> {
  static constexpr bool kAny = true;
  template <class Visit>
  static void visit(T& value, const Visit& function) {
    std::apply([&]<class... Items>(Items&... item) { (TensorsIn<Items>::visit(item, function), ...); },
               value.tensors());
  }
};

template <class... Items>
struct TensorsIn<std::tuple<Items...>> {
  static constexpr bool kAny = (TensorsIn<Items>::kAny || ...);
  template <class Visit>
  static void visit(std::tuple<Items...>& items, const Visit& function) {
    std::apply([&](Items&... item) { (TensorsIn<Items>::visit(item, function), ...); }, items);
  }
};

template <class First, class Second>
struct TensorsIn<std::pair<First, Second>> {
  static constexpr bool kAny = TensorsIn<First>::kAny || TensorsIn<Second>::kAny;
  template <class Visit>
  static void visit(std::pair<First, Second>& pair, const Visit& function) {
    TensorsIn<First>::visit(pair.first, function);
    TensorsIn<Second>::visit(pair.second, function);
  }
};

template <class Item>
struct TensorsIn<std::vector<Item>> : detail::TensorsInRange<std::vector<Item>, Item> {};
template <class Item, size_t size>
struct TensorsIn<std::array<Item, size>> : detail::TensorsInRange<std::array<Item, size>, Item> {};

template <class Item>
struct TensorsIn<std::optional<Item>> {
  static constexpr bool kAny = TensorsIn<Item>::kAny;
  template <class Visit>
  static void visit(std::optional<Item>& item, const Visit& function) {
    if (item) TensorsIn<Item>::visit(*item, function);
  }
};

template <class Key, class Item>
struct TensorsIn<std::map<Key, Item>> {
  static constexpr bool kAny = TensorsIn<Item>::kAny;
  template <class Visit>
  static void visit(std::map<Key, Item>& items, const Visit& function) {
    for (auto& [key, item] : items) TensorsIn<Item>::visit(item, function);
  }
};

/// Returns the number of samples in a batch: the size along dimension 0 of its member `data`, as LibTorch's Examples
/// have it, or of its first tensor that has a dimension. 1 if there is none.
template <class Batch>
int64_t samples_in(const Batch& batch) {
  if constexpr (requires { batch.data.size(0); }) {
    return batch.data.size(0);
  } else {
    std::optional<int64_t> samples;
    TensorsIn<Batch>::visit(const_cast<Batch&>(batch), [&](const at::Tensor& tensor) {
      if (!samples && tensor.dim() > 0) samples = tensor.size(0);
    });
    return samples.value_or(1);
  }
}

}  // namespace lockstep
