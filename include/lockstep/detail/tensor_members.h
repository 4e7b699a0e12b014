#pragma once

#include <tuple>

namespace lockstep {

template <class T>
struct TensorsIn;

namespace detail {

template <class T>
inline constexpr bool kIsTupleOfReferences = false;
template <class... Items>
inline constexpr bool kIsTupleOfReferences<std::tuple<Items&...>> = true;

template <class T>
concept ListsTensors = requires(T& value) {
  requires kIsTupleOfReferences<decltype(value.tensors())>;
};

template <class Range, class Item>
struct TensorsInRange {
  static constexpr bool kAny = TensorsIn<Item>::kAny;
  template <class Visit>
  static void visit(Range& items, const Visit& function) {
    if constexpr (kAny)
      for (auto& item : items) TensorsIn<Item>::visit(item, function);
  }
};

}  // namespace detail

}  // namespace lockstep
